"""What a worker is started with."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from engine.profiles import profile
from engine.scheduler_types import SchedulerSettings

DEFAULT_VOCAB = 32_000  # of a worker without a tokenizer


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Everything a worker needs to know; lifetime: process. Raises ValueError.

    `profile_name` is a timed worker's; None: it computes, and `kv_tokens` says how much fits.
    `kv_tokens` None takes the profile's capacity; it is cut to whole blocks. Ports of 0 are
    chosen by the system. `speed` divides the time of every step.
    """

    profile_name: str | None
    speed: float = 1.0
    kv_tokens: int | None = None
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
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)

    def __post_init__(self) -> None:
        if not 0.0 < self.speed <= 1e6:
            raise ValueError(f"speed must be above 0 and at most 1e6, got {self.speed}")
        if not 1 <= self.block_size <= 1024:
            raise ValueError(f"block size must be 1..1024 tokens, got {self.block_size}")
        for name in ("port", "events_port", "replay_port"):
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

    @property
    def blocks(self) -> int:
        """Whole blocks of KV cache."""
        tokens = self.kv_tokens
        if tokens is None:
            if self.profile_name is None:
                raise ValueError("kv tokens must be given where there is no profile")
            tokens = profile(self.profile_name).kv_capacity_tokens
        return tokens // self.block_size
