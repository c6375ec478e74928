"""Computes the memory that a model in a folder needs on a device, and the memory that the device
has; it reads the shapes of the weights only.

Memory and limits are those of one moment: several workers that start on one device must ask one
after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from engine.capacity import CapacityError, Footprint, Limits, readable
from engine.model.attention import MAX_GATHERED
from engine.model.backends import (
    ALL_KERNELS,
    FLASHINFER,
    KVKERNELS,
    MMA,
    Int8Choice,
    KernelChoice,
    Ways,
)
from engine.model.batch import is_cuda
from engine.model.checkpoint import Checkpoint, expected
from engine.model.config import (
    DTYPE_BYTES,
    EMBEDDING,
    PLAIN,
    ModelConfig,
    ModelError,
    Quantization,
    Shard,
)
from engine.model.kernel_attention import FLASHINFER_BYTES, FLASHINFER_PLAN_BYTES
from engine.model.kernel_choice import choose_attention, choose_int8
from engine.model.kv_cache import kv_storage
from engine.model.layers import MAX_WIDENED
from engine.runner.graphs import graph_room
from engine.runner.kernel_costs import read_costs, read_ways
from kvkernels.ops.prefill import MOST_SLOTS
from kvkernels.ops.shared_costs import Costs
from kvkernels.ops.shared_decode import most_slots, workspace_bytes

CPU_KV_TOKENS = 65_536  # by default: a machine's memory is not the engine's alone
SAMPLING_COPIES = 4  # of the logits that filters and draws work on


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The ways to run steps; None turns a way on if the device is a GPU.

    With `overlap`, one step is scheduled while another computes, and stages compute different steps
    at a time. With `cuda_graphs`, decode steps are padded to fixed sizes and replayed.
    `kernel_costs` is the file with the costs of the kernels' plans on this device, and with the
    fastest ways of attention; None means predicted costs, and the kernels for every shape.
    """

    overlap: bool | None = None
    cuda_graphs: bool | None = None
    kernel_costs: Path | None = None

    def overlaps(self, device: str) -> bool:
        """Return whether steps overlap on `device`."""
        return is_cuda(device) if self.overlap is None else self.overlap

    def has_graphs(self, device: str) -> bool:
        """Return whether steps use CUDA graphs on `device`."""
        return is_cuda(device) if self.cuda_graphs is None else self.cuda_graphs

    def costs(self, device: str) -> Costs | None:
        """Return the costs of the kernels' plans on `device`. Raises the errors of `read_costs`."""
        return read_costs(self.kernel_costs, device) if self.kernel_costs else None

    def ways(self, device: str) -> Ways:
        """Return the fastest way of attention for steps of each shape on `device`. Raises the
        errors of `read_costs`.
        """
        return read_ways(self.kernel_costs, device) if self.kernel_costs else ALL_KERNELS


PLAIN_STEPS = StepSettings()


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The settings with which a worker loads the model in `directory`.

    Lifetime: process. `dtype` auto means float32 on a CPU, where it is as fast and exact, else the
    checkpoint's own dtype. `quantization` says which weights and KV are stored in fewer bits.
    `tp_size` ranks divide every layer, and `pp_size` stages share the layers: their product is the
    number of processes, each on a GPU if `device` is cuda. `attention` and `int8` are the backends
    of attention and of products with INT8 weights, named as in `backends.BACKENDS`. `steps` says
    how steps follow each other. `threads` is the number of threads of this process's matrix
    products on CPUs; None means torch's choice. `memory_bytes` is the memory that this instance may
    use, with its weights; None means all that is available. `shares_kv`: other processes of this
    host may map the KV.
    """

    directory: Path
    limits: Limits
    device: str = "cpu"
    dtype: str = "auto"
    quantization: Quantization = PLAIN
    tp_size: int = 1
    pp_size: int = 1
    attention: str = "auto"
    int8: str = "auto"
    steps: StepSettings = PLAIN_STEPS
    threads: int | None = None
    memory_bytes: int | None = None
    shares_kv: bool = False

    @property
    def maps_kv(self) -> bool:
        """True if other processes can map the KV: other workers of this host, or the first rank."""
        return self.device == "cpu" and (self.shares_kv or self.tp_size * self.pp_size > 1)


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory of the device, what the model needs of it, and the chosen backends; the arguments
    of `capacity.fit` are among them. Lifetime: start of a process.
    """

    memory_bytes: int  # that may be taken on the device, now
    footprint: Footprint
    limits: Limits  # limits reduced to what the model and a shared machine can do
    dtype: str
    attention: KernelChoice
    int8: Int8Choice | None
    host_bytes: int = 0  # of all ranks, for evicted KV


def needs_of(config: ModelConfig, settings: LoadSettings) -> Needs:
    """Return what the model with this configuration needs. Raises the errors of `load` for folder
    and device, and CapacityError for host memory.
    """
    device, quantization = settings.device, settings.quantization
    _check_device(device, settings.tp_size * settings.pp_size)
    shards = _shards(config, settings.tp_size, settings.pp_size, device)
    name = settings.dtype
    if name == "auto":
        name = "float32" if device == "cpu" else config.dtype
    limits = _within(config, settings.limits, device)
    # Before weights are read: check what the cache cannot do here.
    kv_storage(config, quantization.kv, device, getattr(torch, name))
    with Checkpoint(settings.directory) as checkpoint:
        taken = footprint(config, checkpoint, name, quantization, shards, device == "cpu")
    block_bytes = limits.block_size * sum(
        config.kv_bytes_per_token(name, shard, quantization) for shard in shards
    )
    host_bytes = _host_bytes(limits, block_bytes, memory_bytes("cpu"))
    taken = replace(taken, host_bytes=host_bytes if device == "cpu" else 0)
    first, size = shards[0], limits.block_size  # other ranks have as many heads
    ways = settings.steps.ways(device)
    asked = settings.attention, config, first, device, name, quantization, size
    chosen = choose_attention(*asked, ways)
    if chosen.backend == KVKERNELS:
        is_captured = settings.steps.has_graphs(device) and len(shards) == 1
        each = attention_bytes(config, first, limits, is_captured)
        each *= len(shards) if device == "cpu" else 1
        taken = replace(taken, workspace_bytes=taken.workspace_bytes + each)
    used = {chosen.backend, *chosen.ways.values()}
    if is_cuda(device) and used - {KVKERNELS, MMA, FLASHINFER}:
        gathered = gathered_bytes(config, first, limits, name)
        taken = replace(taken, workspace_bytes=taken.workspace_bytes + gathered)
    if FLASHINFER in used:
        planned = FLASHINFER_BYTES + 2 * FLASHINFER_PLAN_BYTES
        taken = replace(taken, workspace_bytes=taken.workspace_bytes + planned)
    products = choose_int8(settings.int8, config, shards, device, name, quantization)
    return Needs(memory_bytes(device), taken, limits, name, chosen, products, host_bytes)


def _host_bytes(limits: Limits, block_bytes: int, available_bytes: int) -> int:
    """Return the host memory that evicted KV takes. Raises CapacityError if less is available."""
    needed_bytes = limits.host_blocks * block_bytes
    if needed_bytes > available_bytes:
        most = available_bytes // block_bytes * limits.block_size
        raise CapacityError(
            f"host_kv_tokens {limits.host_kv_tokens} take {readable(needed_bytes)} of host memory "
            f"and {readable(available_bytes)} are available: lower it to {most} or less"
        )
    return needed_bytes


def _check_device(device: str, ranks: int) -> None:
    """Raise ValueError if torch cannot compute on `device` with one GPU for each rank."""
    try:
        kind, index = (found := torch.device(device)).type, found.index or 0
    except RuntimeError:
        kind, index = "", 0
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device {device:.80} is none that is served; say cpu, cuda or cuda:N")
    there = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and max(index + 1, ranks) > there:
        raise ValueError(
            f"device {device}: {max(index + 1, ranks)} GPUs are asked for and torch finds {there} "
            "here; say cpu, or install a driver and a torch with CUDA, or ask for fewer"
        )


def _shards(config: ModelConfig, tp_size: int, pp_size: int, device: str) -> list[Shard]:
    """Return every rank's part of the model, in order of rank."""
    if tp_size * pp_size > 1 and device not in ("cpu", "cuda"):
        raise ValueError(f"device {device}: ranks take cuda:0, cuda:1, ... each: say cuda")
    shards = [Shard(tp, tp_size, pp, pp_size) for pp in range(pp_size) for tp in range(tp_size)]
    config.check_shard(shards[0])
    return shards


def _within(config: ModelConfig, limits: Limits, device: str) -> Limits:
    """Return `limits`, reduced to the model's longest sequence and, on a CPU, to a default number
    of KV tokens.
    """
    if limits.must_fit and limits.max_model_tokens > config.max_positions:
        raise ModelError(
            config.path,
            f"max_model_len {limits.max_model_tokens} exceeds the {config.max_positions} "
            "positions of the model",
            "lower it",
        )
    longest = min(limits.max_model_tokens, config.max_positions)
    limits = replace(limits, max_model_tokens=longest)
    if device == "cpu" and limits.max_tokens_in_paged_kv_cache is None:
        wanted = max(CPU_KV_TOKENS, longest) if limits.must_fit else CPU_KV_TOKENS
        limits = replace(limits, max_tokens_in_paged_kv_cache=wanted)
    return limits


def footprint(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: str,
    quantization: Quantization = PLAIN,
    shards: Sequence[Shard] = (Shard(),),
    is_shared: bool = True,
) -> Footprint:
    """Return the memory that the model takes, computed from the shapes in its files.

    `shards` are the parts of all ranks. With `is_shared` the ranks use one memory; otherwise each
    has its own, and the result is that of the rank that takes most. A rank's part of a matrix
    counts as an equal part.
    """
    size = DTYPE_BYTES[dtype]
    shapes = {name: checkpoint.info(name).shape for name in checkpoint.names()}
    together = sum if is_shared else max
    covered = [prod(shape) for name, shape in shapes.items() if quantization.covers(name)]
    heads = config.heads + 2 * config.kv_heads
    widest = max(3 * config.intermediate_size, 3 * heads * config.head_dim)
    return Footprint(
        weights_bytes=together(
            sum(
                quantization.weight_bytes(name, shape, size) // (shard.tp_size if cut else 1)
                for name, shape, cut in _read_by(config, shard, shapes)
            )
            for shard in shards
        ),
        kv_bytes_per_token=together(
            config.kv_bytes_per_token(dtype, shard, quantization) for shard in shards
        ),
        # The residual stream, its norm in float32, and the widest layer's inputs and outputs.
        activation_bytes_per_token=4 * (3 * config.hidden_size + widest),
        activation_bytes_per_request=4 * SAMPLING_COPIES * config.vocab,
        # Three: Q, K and V are one matrix, and none is larger than the largest.
        workspace_bytes=size * min(MAX_WIDENED, 3 * max(covered, default=0)),
    )


def attention_bytes(config: ModelConfig, shard: Shard, limits: Limits, has_graphs: bool) -> int:
    """Return the most memory that the kernels' partial results take on a rank while a step
    computes. Graphs have memory of their own for these results and for the page table, as large as
    the largest graph needs.
    """
    heads, rows = shard.part(config.heads), limits.max_batch_size
    slots, table = MOST_SLOTS + most_slots(rows, rows * limits.max_model_tokens), 0
    if has_graphs:
        room = graph_room(rows, limits.max_model_tokens, limits.block_size, True)
        slots += most_slots(rows, room.tokens)
        table = rows * room.table_bytes
    return workspace_bytes(slots, heads.stop - heads.start, config.head_dim) + table


def gathered_bytes(config: ModelConfig, shard: Shard, limits: Limits, dtype: str) -> int:
    """Return the most memory that torch's attention on a GPU takes on a rank. Torch gathers K and V
    of the longest context of a layer from its pages, and copies V once more, with zeros beyond its
    end.
    """
    kv_heads = shard.kv_heads(config.kv_heads)
    heads = kv_heads.stop - kv_heads.start
    size: int = DTYPE_BYTES[dtype]
    longest: int = limits.max_model_tokens * heads * config.head_dim
    return 3 * size * max(longest, MAX_GATHERED)


def _read_by(
    config: ModelConfig, shard: Shard, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yield the name and shape of each tensor that a shard reads, and whether it reads only a part
    of it.
    """
    if len(shapes) and shard == Shard():  # all of the files, whatever is in them
        yield from ((name, shape, False) for name, shape in shapes.items())
        return
    for name, shape in expected(config, shard):
        yield name, shape, len(shape) == 2 and name != EMBEDDING


def memory_bytes(device: str) -> int:
    """Return the number of bytes that are available on `device` at present."""
    if device != "cpu":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes)
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/meminfo does not say what memory is available")
