"""One rank of a model that several processes share through torch.distributed, and the batches that
it gets.

Rank r of the group is tensor-parallel rank r % tp_size of stage r // tp_size. In every step each
rank gets the same batch, over a pipe from rank 0. `python -m engine.runner.ranks SPEC` is the
program of one rank; rank 0 starts it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import IO, Any

import msgspec
import numpy as np
import torch
from torch import distributed

from engine.model.backends import ALL_KERNELS, KVKERNELS, TORCH, FellBack
from engine.model.batch import FlatBatch, Sizes
from engine.model.checkpoint import Checkpoint
from engine.model.config import ModelError, Quantization, Shard, read_config
from engine.model.kernel_attention import attention_of
from engine.model.kv_cache import HostKv, KvCache, Moves
from engine.model.transformer import Transformer
from engine.scheduler.scheduler import MAX_STEPS_IN_FLIGHT

# Printed by a rank once it has loaded, with the files of its KV if they are shared.
READY = b"ready"
MOVED = b"moved"  # and when it has copied blocks
_MAGIC = 0x57_52_42_33
_MOVES_MAGIC = 0x57_52_4D_31
_HEAD = 8 * (len(Sizes._fields) + 1)


def batch_bytes(batch: FlatBatch) -> bytes:
    """Return `batch` as bytes, with a frame. The batch must have its tokens, because only rank 0
    has the pool of the latest tokens.
    """
    head = np.array([*batch.sizes, _MAGIC], dtype="<i8")
    spans = np.array(batch.spans, dtype="<i8")
    return head.tobytes() + spans.tobytes() + batch.data.cpu().numpy().tobytes()


def moves_bytes(moves: Moves) -> bytes:
    """Return `moves` as bytes, with the frame that batches have."""
    head = np.zeros(_HEAD // 8, dtype="<i8")
    head[0], head[1], head[-1] = moves.to_host, len(moves.block_ids), _MOVES_MAGIC
    return head.tobytes() + np.array([*moves.block_ids, *moves.host_ids], "<i8").tobytes()


def read_batch(pipe: IO[bytes], device: str) -> FlatBatch | Moves | None:
    """Return the next batch from the pipe, on `device`, or the next blocks to copy; None at the
    end. Raises EOFError if the pipe ends within one of them.
    """
    head = pipe.read(_HEAD)
    if not head:
        return None
    *counts, magic = np.frombuffer(_whole(head, _HEAD), "<i8").tolist()
    if magic == _MOVES_MAGIC:
        to_host, count = counts[:2]
        ids = np.frombuffer(_whole(pipe.read(16 * count), 16 * count), "<i8").tolist()
        return Moves(bool(to_host), ids[:count], ids[count:])
    if magic != _MAGIC:
        raise EOFError("the batches of rank 0 do not begin where they should")
    sizes = Sizes(*counts)
    spans_size = 3 * 8 * sizes.requests
    size = spans_size + sizes.nbytes
    body = bytearray(_whole(pipe.read(size), size))
    spans = np.frombuffer(body, "<i8", 3 * sizes.requests).reshape(-1, 3)
    data = torch.frombuffer(body, dtype=torch.uint8, offset=spans_size)
    return FlatBatch.over(data, sizes, tuple((int(a), int(b), int(c)) for a, b, c in spans)).on(
        device
    )


def _whole(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise EOFError(f"rank 0 ended within a batch: {len(data)} of {size} bytes")
    return data


STEP_S = 120.0
START_S = 120.0  # for the processes to start


@dataclass(frozen=True, slots=True)
class RankSpec:
    """The model that a rank loads, and the port at which ranks meet. Lifetime: process. The
    `device` of a group is cpu, or cuda: then rank r uses cuda:r. `port` is the port of torch's
    store on 127.0.0.1.
    """

    directory: str
    rank: int
    tp_size: int
    pp_size: int
    device: str
    dtype: str
    max_tokens: int
    blocks: int
    block_size: int
    port: int = 0  # rank 0 chooses
    threads: int | None = None
    weights: str = "none"
    kv: str = "auto"
    attention: str = TORCH  # a backend's name
    ways: dict[str, str] = field(default_factory=lambda: dict(ALL_KERNELS))  # of `KernelChoice`
    int8: str = TORCH  # the same, of products with INT8 weights
    shares_kv: bool = False  # rank 0 can map its KV
    host_blocks: int = 0  # that it keeps when they are evicted
    step_s: float = STEP_S  # a rank that waits longer for the others gives up

    @property
    def shard(self) -> Shard:
        """The rank's part of the model."""
        stage, rank = divmod(self.rank, self.tp_size)
        return Shard(rank, self.tp_size, stage, self.pp_size)

    @property
    def own_device(self) -> str:
        """The device on which the rank computes."""
        return f"cuda:{self.rank}" if self.device == "cuda" else "cpu"


class Stage:
    """The ranks of one stage, which divide every layer among them. Lifetime: process."""

    def __init__(self, group: Any, size: int, is_cpu: bool) -> None:
        self._group, self._size, self._is_cpu = group, size, is_cpu

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all ranks. On CPUs it is added in order of rank, so that a
        row's bits do not depend on its place in the tensor, as they would if different ranks added
        different parts.
        """
        if not self._is_cpu:
            distributed.all_reduce(x, group=self._group)
            return x
        first, *others = self._all(x)
        for other in others:
            first = first + other
        return first

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' `x` in order of rank, joined along the last dimension."""
        return torch.cat(self._all(x), dim=-1)

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._size)]
        distributed.all_gather(parts, x, group=self._group)
        return parts


class RankModel:
    """The weights and KV of a rank, and its part of each step. Lifetime: process; each process has
    one.
    """

    def __init__(self, spec: RankSpec) -> None:
        """Meet the other ranks, then load this rank's part of the model. Raises ModelError, OSError
        or RuntimeError if that fails.
        """
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self._spec, self._shard = spec, spec.shard
        size = spec.tp_size * spec.pp_size
        step_s = timedelta(seconds=spec.step_s)
        distributed.init_process_group(
            "gloo" if spec.device == "cpu" else "nccl",
            store=distributed.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", spec.port, size, spec.rank == 0, timedelta(seconds=START_S)
            ),
            rank=spec.rank,
            world_size=size,
            timeout=step_s,
        )
        try:
            self._load(size, step_s)
        except BaseException:  # a process may be in one group at a time
            distributed.destroy_process_group()
            raise

    def _load(self, size: int, step_s: timedelta) -> None:
        """Create the rank's process groups, and load its weights and KV."""
        spec = self._spec
        # Every rank makes every group, in the same order: torch.distributed asks for that.
        stages = [
            distributed.new_group(list(range(first, first + spec.tp_size)), timeout=step_s)
            for first in range(0, size, spec.tp_size)
        ]
        self._back = distributed.new_group(list(range(size)), timeout=step_s)
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()  # until they are taken
        stage = Stage(stages[self._shard.pp_rank], spec.tp_size, spec.device == "cpu")
        config = read_config(Path(spec.directory))
        self._dtype = getattr(torch, spec.dtype)
        self._hidden_size, self._vocab = config.hidden_size, config.vocab
        quantization = Quantization(spec.weights, spec.kv)
        with Checkpoint(Path(spec.directory)) as checkpoint:
            self._model = Transformer(
                config,
                checkpoint,
                spec.own_device,
                self._dtype,
                self._shard,
                stage if spec.tp_size > 1 else None,
                spec.max_tokens,
                quantization,
                attention_of(spec.attention, spec.ways),
                spec.int8 == KVKERNELS,
            )
        self.kv = KvCache(
            *(config, spec.blocks, spec.block_size, spec.own_device, self._dtype, self._shard),
            *(spec.kv, spec.shares_kv),
        )
        self._host = HostKv(self.kv, spec.host_blocks)

    @property
    def fell_back(self) -> FellBack:
        """The parts that torch computes in place of this rank's failed kernels, and why."""
        return self._model.fell_back

    def compute(self, batch: FlatBatch) -> torch.Tensor | None:
        """Compute this rank's part of a step. Return the logits [S, vocab] on rank 0 of a model
        with one stage, else None.
        """
        spec, shard = self._spec, self._shard
        hidden = None
        if not shard.is_first:
            shape = (len(batch.token_ids), self._hidden_size)
            hidden = torch.empty(shape, dtype=self._dtype, device=spec.own_device)
            distributed.recv(hidden, spec.rank - spec.tp_size)
        made = self._model.forward(batch, self.kv, hidden)
        if not shard.is_last:
            self._send(made, spec.rank + spec.tp_size, None)
        elif spec.pp_size == 1:
            return made if spec.rank == 0 else None
        elif shard.tp_rank == 0:
            # A step that samples nothing is over when this stage has ended it, which it reports.
            self._send(made if len(made) else made.new_zeros(1, self._vocab), 0, self._back)
        return None

    def move(self, moves: Moves) -> None:
        """Copy blocks as `HostKv.move` does, after this rank has ended its step: rank 0 knows only
        that it has ended its own.
        """
        if self._spec.device != "cpu":
            torch.cuda.current_stream(self._spec.own_device).synchronize()
        self._host.move(moves)

    def logits(self, sampled: int) -> torch.Tensor:
        """Return the logits [sampled, vocab] of the oldest step, on rank 0 of a model with several
        stages.
        """
        spec = self._spec
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        shape = (max(1, sampled), self._vocab)
        made = torch.empty(shape, dtype=wide, device=spec.own_device)
        distributed.recv(made, (spec.pp_size - 1) * spec.tp_size, group=self._back)
        return made[:sampled]

    def _send(self, made: torch.Tensor, to: int, group: Any) -> None:
        """Send a tensor to rank `to` without waiting, unless as many tensors as there are stages
        have not been received yet.
        """
        made = made.contiguous()
        self._sent.append((distributed.isend(made, to, group=group), made))
        while len(self._sent) > self._spec.pp_size:
            self._sent.popleft()[0].wait()

    def close(self) -> None:
        """Leave the process group."""
        distributed.destroy_process_group()


def main() -> int:
    """Run the process of a rank: load, print the ready line, and compute batches until standard
    input ends. Return the exit code.
    """
    # The terminal's Ctrl-C is for rank 0, which lets running requests end first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.argv[1], type=RankSpec)
    try:
        model = RankModel(spec)
        os.write(1, b" ".join((READY, *(file.encode() for file in model.kv.files))) + b"\n")
        batches: Queue[FlatBatch | Moves | BaseException | None] = Queue(MAX_STEPS_IN_FLIGHT)
        Thread(target=_read, args=(batches, spec.own_device), daemon=True).start()
        while (batch := batches.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            if isinstance(batch, Moves):
                model.move(batch)
                os.write(1, MOVED + b"\n")
            else:
                model.compute(batch)
    except (ModelError, OSError, EOFError, RuntimeError) as error:
        print(f"warmroute-engine: rank {spec.rank}: {error}", file=sys.stderr, flush=True)
        return 1
    model.close()
    return 0


def _read(batches: Queue[FlatBatch | Moves | BaseException | None], device: str) -> None:
    """Read batches as they come and put them into `batches`, so that rank 0 need not wait until
    this rank is ready for them.
    """
    try:
        while (batch := read_batch(sys.stdin.buffer, device)) is not None:
            batches.put(batch)
        batches.put(None)
    except BaseException as error:  # noqa: BLE001 - the rank ends with it
        batches.put(error)


if __name__ == "__main__":
    sys.exit(main())
