"""Loads a model folder into a runner: first it counts what fits, then it reads the weights."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.block_pool import BlockPool
from engine.capacity import Capacity, fit
from engine.model.backends import KVKERNELS, TORCH, FellBack, Int8Choice, KernelChoice
from engine.model.batch import FlatBatch, Planner
from engine.model.checkpoint import Checkpoint
from engine.model.config import (
    DTYPE_BYTES,
    SCALE_BYTES,
    ModelConfig,
    ModelError,
    Quantization,
    Shard,
    read_config,
)
from engine.model.kernel_attention import KernelPlanner, attention_of
from engine.model.kv_cache import (
    HostKv,
    KvCache,
    KvMemory,
    Moves,
    RankMemory,
    kv_storage,
    layout_of,
)
from engine.model.transformer import Transformer
from engine.runner.compute import Compute, StagedCompute
from engine.runner.graphs import DecodeGraphs
from engine.runner.group import Group
from engine.runner.needs import PLAIN_STEPS, LoadSettings, Needs, StepSettings, needs_of
from engine.runner.ranks import RankSpec
from engine.runner.runner import RealRunner
from engine.runner.torch_sampler import Sampler
from engine.scheduler.request import Request
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.types import Output, SchedulerSettings, Step
from engine.timed import LoopClock
from engine.wire.hf import HfTokenizer
from engine.wire.kv_transfer import Form
from kvkernels.ops.shared_costs import AttentionShape, Costs

log = logging.getLogger(__name__)


TORCH_ATTENTION = KernelChoice()


class Computing:
    """A model in this process: its weights, its KV cache, and host memory for `host_blocks` evicted
    blocks. Lifetime: worker.
    """

    def __init__(self, transformer: Transformer, kv: KvCache, host_blocks: int = 0) -> None:
        self._transformer = transformer
        self.kv = kv
        self._host = HostKv(kv, host_blocks)

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype of the tensor that `logits` returns."""
        return torch.float64 if self._transformer.dtype == torch.float64 else torch.float32

    @property
    def fell_back(self) -> FellBack:
        """The parts that torch computes in place of failed kernels, and why."""
        return self._transformer.fell_back

    def logits(self, batch: FlatBatch) -> torch.Tensor:
        return self._transformer.forward(batch, self.kv)

    def move(self, moves: Moves) -> None:
        self._host.move(moves)

    def close(self) -> None:
        """Do nothing: memory is freed with the process."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that was loaded, with its tokenizer and its settings. Lifetime: worker."""

    config: ModelConfig
    tokenizer: HfTokenizer
    capacity: Capacity
    scheduler: SchedulerSettings
    device: str
    model: Computing | Group
    steps: StepSettings = PLAIN_STEPS
    attention: KernelChoice = TORCH_ATTENTION
    int8: Int8Choice | None = None  # the backend of INT8 weights, if there are any
    planner: Planner | None = None  # plans the kernels' reads, if kernels compute attention
    kv: KvMemory | None = None  # None: it is where transfers do not reach
    report: Callable[[str], None] = log.info

    def runner(
        self,
        pool: BlockPool,
        on_step: Callable[[Step, list[Output], float], None],
        on_failed: Callable[[Sequence[Request], str], None],
    ) -> RealRunner:
        """Return a runner for a worker with the block pool `pool`, which has as many blocks as the
        capacity says. Raises ValueError if the pool has more blocks in the host than there is host
        memory for.
        """
        if pool.host.blocks > self.capacity.host_blocks:
            raise ValueError(
                f"{pool.host.blocks} host blocks were asked for, {self.capacity.host_blocks} loaded"
            )
        # The last layer may be wider than the vocabulary; those ids have no text.
        sampler = Sampler(self.tokenizer.vocab)
        common = sampler, self.scheduler.max_batch_size, pool.block_size, self.device
        overlaps = self.steps.overlaps(self.device)
        steps = 2
        compute: StagedCompute | None = None
        if isinstance(self.model, Group) and self.model.stages > 1:
            steps = self.model.stages
            compute = StagedCompute(self.model, *common, self.planner, self.int8)
        scheduler = Scheduler(
            self.scheduler,
            pool,
            steps_in_flight=steps if overlaps else 1,
            runs_ahead=compute is None,
        )
        runner = RealRunner(
            scheduler,
            compute
            or Compute(
                *(self.model, *common, self._graphs(self.scheduler.max_batch_size)),
                *(self.planner, self.int8),
            ),
            on_step,
            on_failed,
            LoopClock(),
        )
        if self.kv is not None:
            self.kv.before_write = runner.wait_saved
        return runner

    def _graphs(self, rows: int) -> DecodeGraphs | None:
        """Capture the graphs of decode steps and return them; return None if other processes have a
        part in each step.
        """
        if not self.steps.has_graphs(self.device) or isinstance(self.model, Group):
            return None
        return DecodeGraphs(
            self.model.logits,
            rows,
            self.scheduler.max_model_tokens,
            self.capacity.block_size,
            self.config.vocab,
            self.model.logits_dtype,
            self.device,
            self.report,
            self.planner,
            lambda: self.model.fell_back,
        )


def load(
    settings: LoadSettings,
    scheduler: SchedulerSettings,
    on_needs: Callable[[Capacity, Needs], None] = lambda capacity, needs: None,
) -> Loaded:
    """Load a model folder. `on_needs` gets what fits and which backends compute, before the weights
    are read.

    Raises ModelError (a ValueError) or OSError for the folder, CapacityError for the memory,
    GroupLost (a RuntimeError) if another rank could not load.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    directory, device, tp_size = settings.directory, settings.device, settings.tp_size
    quantization, steps = settings.quantization, settings.steps
    config = read_config(directory)
    tokenizer = _tokenizer(directory, config)
    needs = needs_of(config, settings)
    limits, name, chosen = needs.limits, needs.dtype, needs.attention
    room_bytes = settings.memory_bytes
    if room_bytes is None:
        room_bytes = needs.memory_bytes
    capacity = fit(room_bytes, needs.footprint, limits)
    on_needs(capacity, needs)
    shard, costs = Shard(0, tp_size), steps.costs(device)
    planner = _planner(chosen, config, shard, capacity, name, quantization, costs)
    model = _model(
        RankSpec(
            str(directory), 0, tp_size, settings.pp_size, device, name,
            max_tokens=limits.max_model_tokens,
            blocks=capacity.blocks, block_size=capacity.block_size,
            threads=settings.threads, weights=quantization.weights, kv=quantization.kv,
            attention=chosen.backend, ways=dict(chosen.ways),
            int8=needs.int8.backend if needs.int8 else TORCH,
            shares_kv=settings.maps_kv, host_blocks=capacity.host_blocks,
        ),
        config,
    )  # fmt: skip
    scheduler = replace(scheduler, max_model_tokens=limits.max_model_tokens)
    return Loaded(
        *(config, tokenizer, capacity, scheduler, device, model, steps, chosen),
        *(needs.int8, planner, _kv_memory(config, model, capacity, settings, name)),
    )


def _model(spec: RankSpec, config: ModelConfig) -> Computing | Group:
    """Return the model with its weights and KV memory, in this process or in as many processes as
    `spec` says.
    """
    if spec.tp_size * spec.pp_size > 1:
        return Group(spec)
    device, dtype = spec.device, getattr(torch, spec.dtype)
    quantization = Quantization(spec.weights, spec.kv)
    with Checkpoint(Path(spec.directory)) as checkpoint:
        transformer = Transformer(
            config, checkpoint, device, dtype,
            max_tokens=spec.max_tokens, quantization=quantization,
            attention=attention_of(spec.attention, spec.ways), int8_kernel=spec.int8 == KVKERNELS,
        )  # fmt: skip
    kv = KvCache(
        *(config, spec.blocks, spec.block_size, device, dtype),
        kv=spec.kv,
        shared=spec.shares_kv,
    )
    return Computing(transformer, kv, spec.host_blocks)


def _kv_memory(
    config: ModelConfig,
    model: Computing | Group,
    capacity: Capacity,
    settings: LoadSettings,
    dtype: str,
) -> KvMemory | None:
    """Return the KV of all ranks as bytes; None on a GPU, where transfers are not supported yet."""
    if settings.device != "cpu":
        return None
    storage = kv_storage(config, settings.quantization.kv, "cpu", getattr(torch, dtype))
    told = f"{dtype} {settings.quantization.weights} {fingerprint(settings.directory)}"
    form = Form(
        hashlib.sha256(told.encode()).hexdigest(),
        *(config.layers, config.kv_heads, config.head_dim * storage.itemsize),
        str(storage).removeprefix("torch."),
        0 if settings.quantization.kv == "auto" else SCALE_BYTES,
    )
    if isinstance(model, Computing):
        return KvMemory(form, [RankMemory.of(config, model.kv)], settings.shares_kv)
    ranks = []
    for rank, files in enumerate(model.kv_files):
        stage, place = divmod(rank, settings.tp_size)
        shard = Shard(place, settings.tp_size, stage, settings.pp_size)
        blocks = capacity.blocks, capacity.block_size
        layout = layout_of(config, *blocks, storage.itemsize, shard)
        ranks.append(RankMemory.at(layout, files, writable=True))
    return KvMemory(form, ranks, settings.shares_kv)


SAMPLES, SAMPLE_BYTES = 16, 64 << 10  # of each file of weights


def fingerprint(directory: Path) -> str:
    """Return a digest by which models with different configurations or weights differ. It covers
    samples of the weights, because reading all of them would take minutes. Raises OSError if a file
    cannot be read.
    """
    seen = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        seen.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for at in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
                file.seek(at)
                seen.update(file.read(SAMPLE_BYTES))
    return seen.hexdigest()


def _planner(
    chosen: KernelChoice,
    config: ModelConfig,
    shard: Shard,
    capacity: Capacity,
    dtype: str,
    quantization: Quantization,
    costs: Costs | None,
) -> Planner | None:
    if chosen.backend != KVKERNELS:
        return None
    heads, kv_heads = shard.part(config.heads), shard.kv_heads(config.kv_heads)
    counts = heads.stop - heads.start, kv_heads.stop - kv_heads.start  # other ranks have as many
    kept = (DTYPE_BYTES[dtype], 0) if quantization.kv == "auto" else (1, SCALE_BYTES)
    shape = AttentionShape(*counts, config.head_dim, kept[0], config.layers, kept[1])
    blocks = capacity.blocks, capacity.block_size
    return KernelPlanner(shape, *blocks, shard.tp_size, costs, chosen.ways)


def _tokenizer(directory: Path, config: ModelConfig) -> HfTokenizer:
    path = directory / "tokenizer.json"
    try:
        tokenizer = HfTokenizer(directory)
    except OSError as error:
        raise ModelError(path, f"cannot be read: {error}", "copy it from the model") from error
    except ValueError as error:
        advice = "copy its tokenizer and chat template from the model"
        raise ModelError(directory, str(error), advice) from error
    if tokenizer.vocab > config.vocab:
        raise ModelError(
            path,
            f"has {tokenizer.vocab} ids, the model {config.vocab}",
            "the two belong to different models: copy both from one",
        )
    return tokenizer
