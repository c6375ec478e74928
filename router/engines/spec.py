"""A worker in the operator's configuration: its URL and options, each checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from urllib.parse import urlsplit

from policies.facts import Role
from policies.near import did_you_mean
from router.events.sources import MAX_RANK, endpoint_at_rank, usable

ROLES = ("both", "prefill", "decode")
# vLLM's connectors, and llm-d's sidecar before any engine; other engines have one way each.
TRANSFERS = ("nixl", "mooncake", "sidecar")
MAX_KV_TOKENS = 10**12
MAX_REVISION_CHARACTERS = 128
BIND = "bind:"  # before an endpoint that the router binds and engines connect to
POLL = "poll"  # events are asked for by HTTP


class WorkerSpecError(ValueError):
    """Raised for invalid options of a worker; the text says which one, and what is allowed."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The options of one worker. For an option that is None, the router asks the worker, or sets no
    limit. Policies use the thresholds (`policies.thresholds`); this class only carries them. Raises
    WorkerSpecError for a value out of range.
    """

    url: str  # http(s)://host[:port][/path], without a slash at its end
    kind: str | None = None  # of `router.engines.table`
    model: str | None = None  # the only model to use it for
    rank: int | None = None  # the only data-parallel rank of its engine to use
    block_size: int | None = None  # tokens, 1..4096
    kv_tokens: float | None = None  # its whole KV cache, of one rank
    events: str | None = None  # ZMQ endpoint of its KV events, "bind:" one, "poll" or "none"
    replay: str | None = None  # ZMQ endpoint that replays them
    topic: str | None = None  # of its events: a prefix, or with "bind:" the whole of it
    metrics: str | None = None  # URL of its load figures, where it is not the usual one
    grpc: str | None = None  # HOST:PORT of its gRPC where it is not its own port + 1, or "none"
    role: Role = "both"
    # Workers of a group take KV from each other; by default engine and version.
    group: str | None = None
    revision: str | None = None  # the revision of the served model; by default the engine's own
    transfer: str | None = None  # one of TRANSFERS: how KV passes between vLLM workers
    bootstrap_port: int | None = None  # the port at which decode workers meet a prefill worker
    max_requests: float | None = None  # unfinished requests, at least 1
    max_queued_tokens: float | None = None  # prefill tokens not yet computed, at least 1
    max_kv_fraction: float | None = None  # of its KV capacity, above 0, at most 1
    server_name: str | None = None  # that its certificate has, where it is not the URL's host
    insecure: bool = False  # https without checking the certificate: any server is trusted
    weight: float = 1.0  # its speed relative to the default before it is measured, 0.01..100

    def __post_init__(self) -> None:
        _check_url("url", self.url)
        one_of("role", self.role, ROLES)
        one_of("transfer", self.transfer, (None, *TRANSFERS))
        if self.transfer not in (None, "sidecar") and self.kind not in (None, "vllm"):
            raise WorkerSpecError(f"transfer is for kind=vllm; kind is {self.kind}")
        if self.model is not None and not self.model:
            raise WorkerSpecError("model is empty")
        for name in (
            "url",
            "model",
            "group",
            "revision",
            "events",
            "replay",
            "topic",
            "metrics",
            "grpc",
            "server_name",
        ):
            if "," in (getattr(self, name) or ""):
                raise WorkerSpecError(f"{name} has a comma, which separates options")
        if self.revision is not None and not is_revision(self.revision):
            raise WorkerSpecError(
                f"revision is {self.revision[:40]!r}; allowed: 1 to {MAX_REVISION_CHARACTERS} "
                "printable characters without blanks at its ends"
            )
        if self.rank is not None and not 0 <= self.rank <= MAX_RANK:
            raise WorkerSpecError(f"rank is {self.rank}; allowed: 0..{MAX_RANK}")
        if self.metrics is not None:
            _check_url("metrics", self.metrics)
        if self.grpc not in (None, "none"):
            _check_address("grpc", self.grpc or "")
            if self.insecure:
                raise WorkerSpecError("grpc looks at certificates: it goes without insecure")
        self._check_tls()
        self._check_events()
        self._check_numbers()

    def _check_tls(self) -> None:
        if self.url.startswith("https://"):
            if self.insecure and self.server_name is not None:
                raise WorkerSpecError("insecure looks at no certificate; leave out server_name")
        elif self.insecure or self.server_name is not None:
            raise WorkerSpecError("server_name and insecure are for https:// workers")

    def _check_events(self) -> None:
        if self.events not in ("none", POLL):
            _check_endpoint("events", self.events, f', {BIND}tcp://..., "{POLL}" or "none"')
        _check_endpoint("replay", self.replay)
        for name in ("replay", "topic"):
            if getattr(self, name) is not None and self.events in ("none", POLL):
                raise WorkerSpecError(f"{name} is given, but events={self.events}")
        if len((self.topic or "").encode()) > 1024:
            raise WorkerSpecError("topic is longer than 1024 bytes")

    def _check_numbers(self) -> None:
        if self.block_size is not None and not 1 <= self.block_size <= 4096:
            raise WorkerSpecError(f"block_size is {self.block_size}; allowed: 1..4096 tokens")
        if self.kv_tokens is not None and not 1.0 <= self.kv_tokens <= MAX_KV_TOKENS:
            raise WorkerSpecError(f"kv_tokens is {self.kv_tokens:g}; allowed: 1..1e12 tokens")
        if self.bootstrap_port is not None and not 1 <= self.bootstrap_port <= 65_535:
            raise WorkerSpecError(f"bootstrap_port is {self.bootstrap_port}; allowed: 1..65535")
        for name in ("max_requests", "max_queued_tokens"):
            limit = getattr(self, name)
            if limit is not None and not 1.0 <= limit < math.inf:
                raise WorkerSpecError(f"{name} is {limit:g}; allowed: 1 or more")
        if self.max_kv_fraction is not None and not 0.0 < self.max_kv_fraction <= 1.0:
            raise WorkerSpecError(f"max_kv_fraction is {self.max_kv_fraction:g}; allowed: (0, 1]")
        if not 0.01 <= self.weight <= 100.0:
            raise WorkerSpecError(f"weight is {self.weight:g}; allowed: 0.01..100")

    @property
    def name(self) -> str:
        """The worker's name for people: its URL, or `URL#rank` for a data-parallel rank."""
        return self.url if self.rank is None else f"{self.url}#{self.rank}"

    @property
    def seat(self) -> tuple[str, str] | None:
        """The endpoint that the router binds for the worker's events, and the topic of the events.
        Only one worker may have this pair. None means that the router binds no endpoint for the
        worker.
        """
        if self.events is None or not self.events.startswith(BIND):
            return None
        return self.events.removeprefix(BIND), self.topic or ""

    def __str__(self) -> str:
        """Return the text that `parse_worker_spec` reads back as an equal specification."""
        options = [
            f"{entry.name}={_text(getattr(self, entry.name))}"
            for entry in fields(self)
            if entry.name != "url" and getattr(self, entry.name) != entry.default
        ]
        return ",".join([self.url, *options])


KEYS = tuple(entry.name for entry in fields(WorkerSpec))


def is_revision(text: str) -> bool:
    """Return True if a text may be the name of a revision: its length is bounded, and it is
    printable and has no comma.
    """
    fits = 0 < len(text) <= MAX_REVISION_CHARACTERS and text == text.strip()
    return fits and text.isprintable() and "," not in text


def taken(spec: WorkerSpec) -> str:
    """Return the end of an error message, which says that another worker receives its events at the
    endpoint in `spec`.
    """
    endpoint, topic = spec.seat or ("", "")
    return (
        f"takes the events with topic {topic!r} at {endpoint} already; "
        "workers that share an endpoint each need a topic of their own"
    )


def of_rank(spec: WorkerSpec, rank: int) -> WorkerSpec:
    """Return the options of data-parallel rank `rank` of an engine. `spec` has the options of the
    whole engine and the event endpoints of rank 0; each further rank has the next port
    (`events.source.at_rank`). Raises WorkerSpecError if there is no such port.
    """
    events, replay = spec.events, spec.replay
    try:
        if events is not None and events not in ("none", POLL):
            bind = BIND if events.startswith(BIND) else ""
            events = bind + endpoint_at_rank(events.removeprefix(BIND), rank)
        if replay is not None:
            replay = endpoint_at_rank(replay, rank)
    except ValueError as error:
        raise WorkerSpecError(f"events of rank {rank}: {error}") from error
    return replace(spec, rank=rank, events=events, replay=replay)


def _check_address(name: str, address: str) -> None:
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise WorkerSpecError(f"{name}: {error}") from error
    if not host or not port or parts.netloc != address or "@" in address or not address.isascii():
        raise WorkerSpecError(f"{name} {address!r} is not of the form HOST:PORT")


def _check_url(name: str, url: str) -> None:
    shown = repr(url) if name == "url" else f"{name} {url!r}"
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise WorkerSpecError(f"{name}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise WorkerSpecError(
            f"{shown} is not of the form http(s)://host[:port][/path], as in http://gpu1:8000"
        )
    if parts.username is not None or parts.password is not None:
        # It would be shown in lists and logs. The text is not repeated for the same reason.
        raise WorkerSpecError(f"the {name} carries a user or password; a worker's address may not")
    if parts.query or parts.fragment or any(c.isspace() or not c.isprintable() for c in url):
        raise WorkerSpecError(f"{shown} has a query, a fragment or a blank")


def _check_endpoint(name: str, given: str | None, other: str = "") -> None:
    """Raise WorkerSpecError if an endpoint is invalid. `other` names the other values that the
    option allows. An endpoint with `bind:` is valid only if the option allows it.
    """
    endpoint = given
    if given is not None and other:
        endpoint = given.removeprefix(BIND)
    if endpoint is None or usable(endpoint, bind=endpoint != given):
        return
    raise WorkerSpecError(f"{name} is {given!r}; allowed: tcp://host:port, ipc://path{other}")


def one_of(name: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        names = ", ".join(item for item in allowed if item is not None)
        near = did_you_mean(str(value), (item for item in allowed if item is not None))
        raise WorkerSpecError(f"{name} is {value!r}{near}; allowed: {names}")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
