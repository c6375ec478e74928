"""What each of several instances may take of one device, and the table that says so."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.capacity import Capacity, CapacityError, Footprint, Limits, fit, readable

MAX_INSTANCES = 64
# What a process takes of a GPU before it allocates anything; an estimate, kept by each but the
# one that measured.
CONTEXT_BYTES = 512 << 20


class Measured(msgspec.Struct, frozen=True):
    """What `serve --measure` says. Lifetime: start of a process."""

    memory_bytes: int  # that may be taken on the device
    footprint: Footprint
    limits: Limits
    device: str


@dataclass(frozen=True, slots=True)
class Shares:
    """Equal parts of one device. Lifetime: process."""

    instances: int
    device: str
    memory_bytes: int  # of all of them
    each_bytes: int
    capacity: Capacity  # of each
    most: int  # instances that would fit, MAX_INSTANCES at most

    def report(self) -> str:
        """What fits, for people: a table of the memory, and what each can do."""
        one = self.capacity
        rows = {
            "weights": one.weights_bytes,
            "activations": one.activation_bytes,
            "KV cache": one.kv_bytes,
            "headroom": one.headroom_bytes,
            "share": self.each_bytes,
        }
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
    """Equal shares for so many instances, of `memory_bytes` or of all that was measured.

    Raises CapacityError where a share is too small for one request, saying how many would fit.
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
    """The most instances that fit, at most `limit`. More of them never have more each."""
    for instances in range(1, limit + 1):
        try:
            _each(measured, instances, memory_bytes)
        except CapacityError:
            return instances - 1
    return limit
