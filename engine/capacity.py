"""Computes how many KV blocks fit beside a model, for one worker or for several on one device.

The settings have the names of TensorRT-LLM's backend for Triton: `kv_cache_free_gpu_mem_fraction`
is the share of the memory that weights and activations leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

HEADROOM = 0.2  # share of the free memory that is left alone by default
MAX_BLOCKS = 1 << 31


class CapacityError(Exception):
    """Raised if not even one request fits; the message says how much memory there is, how much is
    needed, and which setting helps.
    """


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory that a model takes, in bytes on this device. Lifetime: process."""

    weights_bytes: int
    kv_bytes_per_token: int
    activation_bytes_per_token: int  # at the peak of a step, a token of its batch
    activation_bytes_per_request: int = 0  # the same for a request's logits
    # Quantized weights that exist in the model's dtype at once, and attention's partial results.
    workspace_bytes: int = 0
    host_bytes: int = 0  # of evicted KV, where that is kept in the same memory: on a CPU


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that the operator sets.

    Lifetime: process. Raises ValueError, which names the setting, for a wrong value.
    `host_kv_tokens` is the number of tokens whose evicted KV is kept in host memory, rounded down
    to full blocks. The report counts in requests of `expected_input_tokens` and
    `expected_output_tokens`. `max_model_tokens` is the greatest length of prompt and output
    together; if `must_fit` is set, the operator asked for that length, so a cache that cannot hold
    one such request is an error.
    """

    block_size: int = 16
    max_num_tokens: int = 8192
    max_batch_size: int = 256
    max_model_tokens: int = 131_072
    must_fit: bool = False
    kv_cache_free_gpu_mem_fraction: float = 1.0 - HEADROOM
    max_tokens_in_paged_kv_cache: int | None = None
    expected_input_tokens: int = 1024
    expected_output_tokens: int = 256
    host_kv_tokens: int = 0

    @property
    def host_blocks(self) -> int:
        """Number of full blocks in host memory."""
        return self.host_kv_tokens // self.block_size

    def __post_init__(self) -> None:
        if not 0.0 < self.kv_cache_free_gpu_mem_fraction <= 1.0:
            raise ValueError(
                "kv_cache_free_gpu_mem_fraction must be above 0 and at most 1, got "
                f"{self.kv_cache_free_gpu_mem_fraction}"
            )
        cap = self.max_tokens_in_paged_kv_cache
        if cap is not None and cap < self.block_size:
            raise ValueError(
                "max_tokens_in_paged_kv_cache must be at least one block of "
                f"{self.block_size} tokens, got {cap}"
            )
        if self.host_kv_tokens and self.host_kv_tokens < self.block_size:
            raise ValueError(
                f"host_kv_tokens must be 0, or at least one block of {self.block_size} tokens, got "
                f"{self.host_kv_tokens}"
            )
        for name in ("expected_input_tokens", "expected_output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Capacity:
    """The KV blocks and requests that fit. Lifetime: process."""

    memory_bytes: int
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    headroom_bytes: int
    blocks: int
    block_size: int
    input_tokens: int  # of the request that is counted in
    output_tokens: int
    fitting_requests: int  # by KV alone
    max_batch_size: int
    limited_by: str
    raise_to: str  # the setting to raise so that more fits, and its value
    host_blocks: int = 0  # that are kept when they are evicted
    host_bytes: int = 0  # of them, in this memory

    @property
    def tokens(self) -> int:
        """KV tokens of all blocks."""
        return self.blocks * self.block_size

    @property
    def requests(self) -> int:
        """Number of requests that can run at once."""
        return min(self.fitting_requests, self.max_batch_size)

    @property
    def warning(self) -> str | None:
        """A warning if the KV cache holds less than `max_batch_size` requests; else None."""
        if self.fitting_requests >= self.max_batch_size:
            return None
        return (
            f"the KV cache holds {self.fitting_requests} requests of ({self.input_tokens}, "
            f"{self.output_tokens}) tokens, fewer than max_batch_size {self.max_batch_size}; "
            f"{self.raise_to}"
        )

    def report(self) -> str:
        """Return a report of what fits, for people: one line, and a table of the memory."""
        rows = self.parts() | {"all": self.memory_bytes}
        table = "\n".join(f"  {name:<12}{readable(count):>12}" for name, count in rows.items())
        return f"{self.summary()}\n{table}"

    def parts(self) -> dict[str, int]:
        """Return the bytes of each part of the memory."""
        rows = {
            "weights": self.weights_bytes,
            "activations": self.activation_bytes,
            "KV cache": self.kv_bytes,
            "evicted KV": self.host_bytes,
            "headroom": self.headroom_bytes,
        }
        return {name: count for name, count in rows.items() if count or name != "evicted KV"}

    def summary(self) -> str:
        """Return one line that says what fits."""
        return (
            f"{self.blocks:,} blocks = {self.tokens:,} tokens = {self.requests:,} requests at "
            f"({self.input_tokens}, {self.output_tokens}); limited by {self.limited_by}"
        )


def fit(memory_bytes: int, footprint: Footprint, limits: Limits) -> Capacity:
    """Return how many KV blocks and requests fit into `memory_bytes`, the memory that this instance
    may use for weights and KV together. Raises CapacityError if not one request of the expected
    shape fits.
    """
    activation_bytes = (
        footprint.activation_bytes_per_token * limits.max_num_tokens
        + footprint.activation_bytes_per_request * limits.max_batch_size
        + footprint.workspace_bytes
    )
    host_bytes = footprint.host_bytes
    free_bytes = memory_bytes - footprint.weights_bytes - activation_bytes - host_bytes
    block_bytes = footprint.kv_bytes_per_token * limits.block_size
    share = limits.kv_cache_free_gpu_mem_fraction
    by_memory = min(MAX_BLOCKS, int(max(0, free_bytes) * share) // block_bytes)
    cap_tokens = limits.max_tokens_in_paged_kv_cache
    by_setting = by_memory if cap_tokens is None else cap_tokens // limits.block_size
    blocks = min(by_memory, by_setting)
    input_tokens, output_tokens = _shape(limits)
    each = _blocks(input_tokens + output_tokens, limits.block_size)
    limited_by = "memory" if by_memory <= by_setting else "max_tokens_in_paged_kv_cache"
    wanted_tokens = each * limits.max_batch_size * limits.block_size
    capacity = Capacity(
        memory_bytes=memory_bytes,
        weights_bytes=footprint.weights_bytes,
        activation_bytes=activation_bytes,
        kv_bytes=blocks * block_bytes,
        headroom_bytes=max(0, free_bytes - blocks * block_bytes),
        blocks=blocks,
        block_size=limits.block_size,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        fitting_requests=blocks // each,
        max_batch_size=limits.max_batch_size,
        limited_by="max_batch_size" if blocks // each > limits.max_batch_size else limited_by,
        raise_to=_remedy(limited_by, wanted_tokens, blocks // each),
        host_blocks=limits.host_blocks,
        host_bytes=host_bytes,
    )
    _refuse_less_than_one(capacity, limits, free_bytes, limited_by)
    return capacity


def _shape(limits: Limits) -> tuple[int, int]:
    """Return the input and output tokens of the request that the report counts in. If it exceeds
    the model's limit, it is shortened, and its output is kept rather than its input.
    """
    longest = limits.max_model_tokens
    output_tokens = min(limits.expected_output_tokens, longest - 1)
    return min(limits.expected_input_tokens, longest - output_tokens), output_tokens


def _refuse_less_than_one(
    capacity: Capacity, limits: Limits, free_bytes: int, limited_by: str
) -> None:
    if free_bytes <= 0:
        evicted = ""
        if capacity.host_bytes:
            evicted = f" and evicted KV ({readable(capacity.host_bytes)} for host_kv_tokens)"
        raise CapacityError(
            f"weights ({readable(capacity.weights_bytes)}) and activations "
            f"({readable(capacity.activation_bytes)} for max_num_tokens {limits.max_num_tokens})"
            f"{evicted} leave nothing of {readable(capacity.memory_bytes)} for the KV cache: lower "
            f"{'host_kv_tokens or ' if evicted else ''}max_num_tokens, or take a larger device, a "
            "smaller model or more devices"
        )
    need_tokens = capacity.input_tokens + capacity.output_tokens
    if limits.must_fit:
        need_tokens = limits.max_model_tokens
    if need_tokens <= capacity.tokens:
        return
    if limited_by == "memory":
        help_by = "raise kv_cache_free_gpu_mem_fraction, lower max_num_tokens or the weights' size"
    else:
        help_by = f"raise max_tokens_in_paged_kv_cache to {need_tokens} or more"
    what = "max_model_len" if limits.must_fit else "the expected request"
    raise CapacityError(
        f"the KV cache holds {capacity.tokens} tokens and {what} needs {need_tokens}, so not one "
        f"such request fits: {help_by}, or ask for shorter requests"
    )


def _remedy(limited_by: str, wanted_tokens: int, fitting: int) -> str:
    setting = "kv_cache_free_gpu_mem_fraction or the memory"
    if limited_by != "memory":
        setting = "max_tokens_in_paged_kv_cache"
    return (
        f"all of them need {wanted_tokens} tokens of KV: raise {setting}, or set max_batch_size "
        f"to {max(1, fitting)}"
    )


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def readable(count: int) -> str:
    """Return bytes in a unit that keeps the number short."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


MAX_INSTANCES = 64
# Memory that a process takes on a GPU before it allocates anything; an estimate, which every
# process but the measuring one reserves.
CONTEXT_BYTES = 512 << 20


class Measured(msgspec.Struct, frozen=True):
    """The memory of a device and the needs of one instance, as `serve --measure` prints them.
    Lifetime: start of a process.
    """

    memory_bytes: int  # that may be taken on the device
    footprint: Footprint
    limits: Limits
    device: str


@dataclass(frozen=True, slots=True)
class Shares:
    """The equal shares of one device that several instances get. Lifetime: process."""

    instances: int
    device: str
    memory_bytes: int  # of all of them
    each_bytes: int
    capacity: Capacity  # of each
    most: int  # instances that would fit, MAX_INSTANCES at most

    def report(self) -> str:
        """Return a report of the shares for people: a table of the memory, and what each instance
        can do.
        """
        one = self.capacity
        rows = one.parts() | {"share": self.each_bytes}
        table = "\n".join(
            f"  {name:<12}{readable(count):>12}{readable(count * self.instances):>12}"
            for name, count in rows.items()
        )
        most = f"at least {self.most}" if self.most == MAX_INSTANCES else f"at most {self.most}"
        return (
            f"{self.instances} instances on {self.device}, which has {readable(self.memory_bytes)} "
            f"for them; {most} would fit\n  {'':<12}{'each':>12}{'all':>12}\n{table}\n"
            f"each: {one.summary()}"
        )


def share_out(measured: Measured, instances: int, memory_bytes: int | None = None) -> Shares:
    """Return equal shares of `memory_bytes`, or of all measured memory, for this many instances.
    Raises CapacityError if a share is too small for one request; the message says how many
    instances would fit.
    """
    if memory_bytes is None:
        memory_bytes = measured.memory_bytes
    try:
        each_bytes, capacity = _each(measured, instances, memory_bytes)
    except CapacityError as error:
        most = _most(measured, memory_bytes, instances - 1)
        helps = f"--instances {most} would fit" if most else "not even one instance would fit"
        share = readable(max(0, _share_bytes(measured, instances, memory_bytes)))
        raise CapacityError(
            f"{instances} instances have {share} each of {readable(memory_bytes)}, and that is "
            f"too little: {error}; {helps}"
        ) from error
    return Shares(
        instances=instances,
        device=measured.device,
        memory_bytes=memory_bytes,
        each_bytes=each_bytes,
        capacity=capacity,
        most=_most(measured, memory_bytes, MAX_INSTANCES),
    )


def _each(measured: Measured, instances: int, memory_bytes: int) -> tuple[int, Capacity]:
    each_bytes = _share_bytes(measured, instances, memory_bytes)
    return each_bytes, fit(max(0, each_bytes), measured.footprint, measured.limits)


def _share_bytes(measured: Measured, instances: int, memory_bytes: int) -> int:
    contexts = 0 if measured.device == "cpu" else (instances - 1) * CONTEXT_BYTES
    return (memory_bytes - contexts) // instances


def _most(measured: Measured, memory_bytes: int, limit: int) -> int:
    """Return the greatest number of instances that fit, at most `limit`. More instances never leave
    more memory for one of them.
    """
    for instances in range(1, limit + 1):
        try:
            _each(measured, instances, memory_bytes)
        except CapacityError:
            return instances - 1
    return limit
