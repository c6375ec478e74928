"""The settings of a worker, and the interface of the runner that it drives."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol, get_args

from engine.block_pool import BlockPool
from engine.cache_groups import CacheGroup, check_room
from engine.profiles import gpus_of, profile
from engine.scheduler.request import Request
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.types import Output, Read, SchedulerSettings, Step, StepSplit
from engine.timed import Clock, LoopClock, TimedRunner
from engine.transfer import KvStore, ModelledKv

Role = Literal["both", "prefill", "decode"]
KvTransport = Literal["tcp", "shm", "none"]
FailurePolicy = Literal["recompute", "fail"]
HOST_GBYTES_PER_S = 25.0  # PCIe 4.0 x16, less its overhead
MODELLED_GBYTES_PER_S = 50.0  # between timed workers: eight lanes of 400 Gb/s make as much
_REVISION = re.compile(r"[!-+\--~]{1,128}")  # shown in JSON, and in a header of requests
DEFAULT_VOCAB = 32_000  # of a worker without a tokenizer


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of a worker; lifetime: process.

    Raises ValueError for an invalid setting. `profile_name` is the profile of a worker that
    imitates an engine; None means that the worker computes, and `kv_tokens` is what fits.
    `kv_tokens` None takes the profile's capacity; it is rounded down to full blocks. If a port is
    0, the system chooses it. `speed` divides the time of every step, load and transfer.
    `host_kv_tokens` is how many tokens of evicted KV are kept in host memory, rounded down to full
    blocks; `host_gbytes_per_s` is the rate at which such a worker loads it again; None means
    HOST_GBYTES_PER_S for each GPU. `cache_groups` are the windows and states that it caches besides
    full attention. Other workers read KV at `kv_port` of `kv_host` (None: `host`, or the machine's
    name if that is any address). `kv_gbytes_per_s` and `kv_latency_ms` describe the link by which
    KV leaves; None means as fast as sockets are, or MODELLED_GBYTES_PER_S for a worker with a
    profile.
    """

    profile_name: str | None
    speed: float = 1.0
    kv_tokens: int | None = None
    host_kv_tokens: int = 0
    host_gbytes_per_s: float | None = None
    cache_groups: tuple[CacheGroup, ...] = ()
    block_size: int = 16
    model_name: str = "warmroute-timed"
    host: str = "127.0.0.1"
    port: int = 8000
    events_port: int = 0
    replay_port: int = 0
    tokenizer: Path | None = None
    vocab: int = DEFAULT_VOCAB
    max_body_bytes: int = 16 << 20
    grace_s: float = 5.0  # on shutdown, for running requests
    tenant_header: str = "x-tenant"  # names the tenant whose share of the blocks is counted
    step_log: Path | None = None  # a line for each step, to calibrate by
    renders: bool = False  # it renders token ids of requests for other programs
    role: Role = "both"  # as it is reported; each request names the role that it needs
    revision: str | None = None  # as it is reported; None: the version is the revision
    kv_transport: KvTransport = "tcp"
    kv_host: str | None = None
    kv_port: int = 0
    kv_load_failure_policy: FailurePolicy = "recompute"
    kv_gbytes_per_s: float | None = None
    kv_latency_ms: float = 0.0
    # Other workers may read a prompt's KV while the rest of it is computed.
    kv_overlap: bool = False
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)

    def __post_init__(self) -> None:
        if not 0.0 < self.speed <= 1e6:
            raise ValueError(f"speed must be above 0 and at most 1e6, got {self.speed}")
        if not 1 <= self.block_size <= 1024:
            raise ValueError(f"block size must be 1..1024 tokens, got {self.block_size}")
        self._check_transfers()
        for name in ("port", "events_port", "replay_port", "kv_port"):
            if not 0 <= getattr(self, name) <= 65_535:
                raise ValueError(f"{name} must be 0..65535, got {getattr(self, name)}")
        if not self.model_name or len(self.model_name) > 256:
            raise ValueError("model name must have 1..256 characters")
        if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", self.tenant_header):
            raise ValueError(f"tenant header must be a header's name, got {self.tenant_header!r}")
        if self.max_body_bytes < 1024:
            raise ValueError(f"max body must be at least 1024 bytes, got {self.max_body_bytes}")
        if not 0.0 <= self.grace_s <= 3600.0:
            raise ValueError(f"grace must be 0..3600 seconds, got {self.grace_s}")
        if self.blocks < 1:
            raise ValueError(f"kv tokens must be at least one block of {self.block_size} tokens")
        check_room(self.cache_groups, self.block_size, self.blocks)

    def _check_transfers(self) -> None:
        if self.revision is not None and not _REVISION.fullmatch(self.revision):
            raise ValueError(
                "revision must have 1..128 printable characters, no blank and no comma, got "
                f"{self.revision[:40]!r}"
            )
        for name, values in (
            ("role", Role),
            ("kv_transport", KvTransport),
            ("kv_load_failure_policy", FailurePolicy),
        ):
            if getattr(self, name) not in get_args(values):
                allowed = ", ".join(get_args(values))
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.kv_gbytes_per_s is not None and not 0.0 < self.kv_gbytes_per_s <= 1e6:
            raise ValueError(
                f"kv_gbytes_per_s must be above 0 and at most 1e6, got {self.kv_gbytes_per_s}"
            )
        if self.host_gbytes_per_s is not None and not 0.0 < self.host_gbytes_per_s <= 1e6:
            raise ValueError(
                f"host_gbytes_per_s must be above 0 and at most 1e6, got {self.host_gbytes_per_s}"
            )
        if self.host_kv_tokens and self.host_kv_tokens < self.block_size:
            raise ValueError(
                f"host_kv_tokens must be 0, or at least one block of {self.block_size} tokens, got "
                f"{self.host_kv_tokens}"
            )
        if self.host_kv_tokens and self.cache_groups:
            raise ValueError("host_kv_tokens must be 0 with cache groups: they stay on the GPU")
        if self.host_kv_tokens and self.profile_name is not None and not self.load_token_s:
            raise ValueError(
                "host_kv_tokens need a profile that says how large a token's KV is "
                "(kv_bytes_per_token), or no load could be timed"
            )
        if not 0.0 <= self.kv_latency_ms <= 60_000.0:
            raise ValueError(f"kv_latency_ms must be 0..60000, got {self.kv_latency_ms}")

    @property
    def link_bytes_per_s(self) -> float | None:
        """The rate at which KV leaves the worker, in bytes per second; None means as fast as
        sockets are.
        """
        given = self.kv_gbytes_per_s
        if given is None and self.profile_name is not None:
            given = MODELLED_GBYTES_PER_S
        return None if given is None else given * 1e9 * self.speed

    @property
    def load_token_s(self) -> float:
        """Seconds to load one token's KV from host memory at speed 1; 0 if unknown."""
        if self.profile_name is None:
            return 0.0
        given = self.host_gbytes_per_s
        rate = HOST_GBYTES_PER_S * gpus_of(self.profile_name) if given is None else given
        return profile(self.profile_name).kv_bytes_per_token / (rate * 1e9)

    @property
    def host_blocks(self) -> int:
        """Number of full blocks in host memory."""
        return self.host_kv_tokens // self.block_size

    @property
    def blocks(self) -> int:
        """Number of full blocks of the KV cache."""
        tokens = self.kv_tokens
        if tokens is None:
            if self.profile_name is None:
                raise ValueError("kv tokens must be given where there is no profile")
            tokens = profile(self.profile_name).kv_capacity_tokens
        return tokens // self.block_size


OnStep = Callable[[Step, list[Output], float], None]
OnFailed = Callable[[Sequence[Request], str], None]
MakeRunner = Callable[[BlockPool, OnStep, OnFailed], "Runner"]
NOTHING: Mapping[str, float] = MappingProxyType({})
# By part of the model ("attention", "int8" if there are such weights): the backend that computes it
# now, and the reason why the kernels do not.
Backends = Callable[[], Mapping[str, tuple[str, str]]]


def no_backends() -> Mapping[str, tuple[str, str]]:
    """Return an empty mapping: the backends of a worker that does not compute."""
    return MappingProxyType({})


class Logprobs(Protocol):
    """The log probabilities of a token: the sampler's `TokenLogprobs`, seen without torch."""

    @property
    def logprob(self) -> float:
        """Natural logarithm of the chosen token's probability."""

    @property
    def top(self) -> Sequence[tuple[int, float]]:
        """The most likely tokens, most likely first."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model and runner behind a worker's HTTP server. Lifetime: process."""

    make_runner: MakeRunner
    computes: bool = False  # tokens are a model's: they may end by themselves, have logprobs
    end_of_text: frozenset[int] = frozenset()
    defaults: Mapping[str, float] = field(default_factory=lambda: NOTHING)  # of sampling, by name
    backends: Backends = no_backends
    store: KvStore | None = None  # None: its KV stays where it is


class Runner(Protocol):
    """Drives a scheduler, step after step. Lifetime: worker."""

    scheduler: Scheduler
    clock: Clock
    overrun_steps_total: int
    busy_s_total: float
    step_s: float  # the last step
    split: StepSplit  # of the last step
    on_read: Callable[[Read], None]  # what is to be read from other workers

    @property
    def logprobs(self) -> Mapping[int, Logprobs]:
        """The requested log probabilities of the last step's tokens, by request id."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `Refused`."""

    def cancel(self, request_id: int) -> bool:
        """Drop a request at once; return False if it is finished already."""

    def wake(self) -> None:
        """Wake a resting engine, because blocks became free or KV arrived."""

    async def run(self) -> None:
        """Run steps until cancelled; rest while there is no request."""


def timed(settings: WorkerSettings, vocab: int) -> ServedModel:
    """Return the model of a worker that computes nothing and waits in each step as long as its
    profile says.
    """
    name = settings.profile_name
    if name is None:
        raise ValueError("a timed worker needs a profile")

    def make(pool: BlockPool, on_step: OnStep, on_failed: OnFailed) -> Runner:
        return TimedRunner(
            Scheduler(settings.scheduler, pool),
            profile(name).step_time,
            vocab,
            settings.speed,
            on_step,
            LoopClock(),
            on_failed,
            settings.load_token_s,
        )

    chosen = profile(name)
    # A profile that does not say how large its KV is moves it in no time.
    kv = ModelledKv(
        f"{settings.model_name} {vocab}", max(1, chosen.kv_bytes_per_token), settings.block_size
    )
    return ServedModel(make, store=kv)
