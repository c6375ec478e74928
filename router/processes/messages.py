"""What a satellite and the leader tell each other.

The leader decides; its satellites read requests and carry them. Each message is MessagePack, an
array that begins with the number of its kind (msgspec's tagged structs). Moments are seconds on the
monotonic clock, the same in all processes; the core is told the leader's, in the order of time.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from router.config.schema import Config
from router.http.errors import WorkerErrorKind
from router.http.explain_header import Asked
from router.http.relay.reply import Header
from router.processes.figures import Family

REQUEST_IDS_BITS = 36  # of a satellite's numbers of requests; above them stands its own number


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What all messages are. Lifetime: until it is read."""


# --- of satellites ------------------------------------------------------------------------------


class Joined(_Message, frozen=True, tag=1):
    """The first one: who is there."""

    seat: int  # 1 and up; the leader sits at 0
    pid: int


class Arrived(_Message, frozen=True, tag=2):
    """A request came: `policies.facts.Arrival`, its chains as bytes."""

    request_id: int
    explain: Asked
    model: str
    prompt_tokens: int
    chains: dict[int, bytes]  # block size -> hashes, 8 bytes each, little endian
    approximate: bool
    max_output_tokens: int | None
    session: str | None
    tenant: str | None
    priority: int
    stream: bool
    longest_prompt_tokens: int | None
    weight: float
    deadline_s: float | None
    needs: str | None
    whose: bytes = b""  # the key whose use the leader counts: `router.keys.ring.Key.whose`
    id: str = ""  # `router.http.desk.Named`, as the next two
    trace: str = ""
    traced: bool = False


class Begun(_Message, frozen=True, tag=3):
    """Its answer began."""

    request_id: int


class Grown(_Message, frozen=True, tag=4):
    """Its answer grew to so many tokens."""

    request_id: int
    output_tokens: int


class Missed(_Message, frozen=True, tag=5):
    """The worker chosen is not known to the satellite (any more): nothing was sent."""

    request_id: int


class Ended(_Message, frozen=True, tag=6):
    """A dispatch is over: `router.http.relay.reply.Outcome`, without a held reply."""

    request_id: int
    own_tokens: int | None
    started_s: float
    status: int | None
    blame: WorkerErrorKind | Literal["", "client"]  # "": nobody's, all went well
    message: str
    bytes_to_client: int
    resumable: bool
    first_byte_s: float | None
    last_byte_s: float | None
    events: int
    usage: tuple[int | None, int | None, int | None] | None  # prompt, completion, cached tokens
    rest: Arrived | None  # of an answer that was cut off: what another worker shall do
    first_token_s: float | None
    why_python: str


class Refused(_Message, frozen=True, tag=7):
    """The client was turned away with `status`: the request is over."""

    request_id: int
    status: int


class Left(_Message, frozen=True, tag=8):
    """The request is over without an answer: its client left, or (`ours`) by a defect."""

    request_id: int
    ours: bool


class Faulty(_Message, frozen=True, tag=9):
    """A request was refused with `status` as its client's fault; 500: ended by a defect of ours."""

    status: int


class Figures(_Message, frozen=True, tag=10):
    """Once a second: what a satellite uses, and what it counts."""

    cpu_s: float
    resident_bytes: int
    families: tuple[Family, ...]


class Logged(_Message, frozen=True, tag=11):
    """Whole lines of the access log."""

    lines: bytes


# --- of the leader ------------------------------------------------------------------------------


class Carrying(_Message, frozen=True, tag=1):
    """A worker, as far as sending it requests goes."""

    worker_id: int
    spec: str  # as `parse_worker_spec` reads it
    rank: int | None  # as its engine calls it
    kind: str | None
    abandoned: int  # how often all that waits there for a first byte was to be given up


class Pool(_Message, frozen=True, tag=2):
    """A model and what its prompts are hashed by."""

    model: str
    base: str
    adapter: str | None
    block_sizes: tuple[int, ...]
    max_model_tokens: int | None
    exact: bool  # its token ids are trusted
    ready_workers: int


class View(_Message, frozen=True, tag=3):
    """The fleet, whole. Told when it changes."""

    workers: tuple[Carrying, ...]
    pools: tuple[Pool, ...]
    ready_workers: int
    reasons: tuple[str, ...]  # why no new requests are wanted; none: they are


class Welcome(_Message, frozen=True, tag=4):
    """The answer to `Joined`."""

    first_request_id: int
    config: Config
    view: View
    key_secret: bytes | None = None  # of the leader's `router.keys.ring.KeyRing`, where it has one


class Settings(_Message, frozen=True, tag=5):
    """The configuration after a reload."""

    config: Config


class Sent(_Message, frozen=True, tag=6):
    """Where a request goes, and what its answer's head gets."""

    request_id: int
    worker_id: int
    headers: tuple[Header, ...]
    uncached_tokens: int  # of its prompt, as expected there
    wait_s: float  # before it is begun
    why: bytes = b""  # the decision, of a traced request


class Turned(_Message, frozen=True, tag=7):
    """A request is turned away."""

    request_id: int
    status: int
    code: str
    message: str
    retry_after_s: float | None
    why: str | None  # the explanation, where the client asked for one
    headers: tuple[tuple[str, str], ...] = ()  # of a key at its limit: what the client is told


class Beat(_Message, frozen=True, tag=8):
    """The answer to `Figures`: the leader is alive."""


OfSatellite = (
    Joined | Arrived | Begun | Grown | Missed | Ended | Refused | Left | Faulty | Figures | Logged
)
OfLeader = Welcome | Settings | View | Sent | Turned | Beat
