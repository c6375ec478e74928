"""Rank 0's side of a group: starts the other ranks as processes, and sends each of them every
batch.

Batches are sent through the ranks' standard inputs: a waiting rank may wait as long as needed, and
notices at once if rank 0 is gone. A rank that ends, or does nothing for `RankSpec.step_s`, ends the
group: every later step fails, and the engine with it (exit code 3).
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import torch

from engine.model.backends import FellBack
from engine.model.batch import FlatBatch
from engine.model.kv_cache import Moves
from engine.runner.ranks import MOVED, READY, RankModel, RankSpec, batch_bytes, moves_bytes


class RankStuck(RuntimeError):  # noqa: N818 - what happened, not a kind of mistake
    """Raised if a rank is alive but does nothing, because it is stopped or hangs."""


def give(process: subprocess.Popen[bytes], data: bytes, limit_s: float) -> None:
    """Write `data` to the process's standard input within `limit_s`.

    Raises RankStuck if the process does not read it, OSError if it is gone.
    """
    assert process.stdin is not None
    pipe = process.stdin.fileno()
    os.set_blocking(pipe, False)
    poll, left = select.poll(), memoryview(data)
    poll.register(pipe, select.POLLOUT)
    until_s = time.monotonic() + limit_s
    while left:
        if not poll.poll(max(0.0, until_s - time.monotonic()) * 1e3):
            raise RankStuck(f"took no batch for {limit_s:g} s: it is stopped, or hangs")
        left = left[os.write(pipe, left) :]


def line_of(process: subprocess.Popen[bytes], limit_s: float, what: str) -> bytes:
    """Return a line of the process's standard output, by which it says that it has done `what`;
    return a part of a line if the output ends. Raises RankStuck if no line came within `limit_s`
    seconds.
    """
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout.fileno(), select.POLLIN)
    if not poll.poll(limit_s * 1e3):
        raise RankStuck(f"did not say that it has {what} for {limit_s:g} s")
    return process.stdout.readline()


END_S = 10.0  # for ranks to end by themselves
LOAD_S = 600.0  # for the other ranks to load, after rank 0 has

log = logging.getLogger(__name__)


class GroupLost(RuntimeError):  # noqa: N818 - what happened, not a kind of mistake
    """Raised if a rank is gone, and a part of the model with it."""


class Group:
    """The ranks of one worker. Lifetime: worker; `close` ends the processes of the ranks."""

    def __init__(self, spec: RankSpec) -> None:
        """Start the other ranks and load this one; return when every rank has loaded. `spec`
        describes rank 0; its port is chosen here. Raises the errors of loading, or GroupLost if
        another rank could not load.
        """
        spec = replace(spec, rank=0, port=_free_port())
        size = spec.tp_size * spec.pp_size
        self.stages = spec.pp_size
        self._step_s = spec.step_s
        self._lost = ""
        self._turn = threading.Lock()  # held while every rank is being given one batch or copy
        self._others = [_start(replace(spec, rank=rank)) for rank in range(1, size)]
        self.kv_files: list[tuple[str, str]] = []  # of each rank, where they are shared
        try:
            self._model = self._load_rank_0(spec)
            self.kv_files.append(self._model.kv.files)
            for rank, process in enumerate(self._others, 1):
                said, *files = _ready_line(rank, process).decode().rstrip("\n").split(" ")
                if said != READY.decode():
                    raise GroupLost(f"rank {rank} ended while it loaded: see its log above")
                self.kv_files.append((files[0], files[1]))
        except BaseException:
            self._kill()
            raise

    def _load_rank_0(self, spec: RankSpec) -> RankModel:
        """Load rank 0, and raise GroupLost if another rank ends meanwhile. Otherwise rank 0 would
        wait for that rank for minutes.
        """
        made: Future[RankModel] = Future()
        threading.Thread(target=_fulfil, args=(made, lambda: RankModel(spec)), daemon=True).start()
        while True:
            if wait([made], 0.1).done:  # not by result's TimeoutError: loading may raise one, too
                return made.result()
            for rank, process in enumerate(self._others, 1):
                if process.poll() is not None:
                    why = f"rank {rank} ended with code {process.returncode} while it loaded"
                    raise GroupLost(f"{why}: see its log above")

    @property
    def fell_back(self) -> FellBack:
        """The kernels of rank 0 that have failed. The other ranks stop using the same kernels,
        because they get no plans from then on.
        """
        return self._model.fell_back

    def logits(self, batch: FlatBatch) -> torch.Tensor:
        """Return the logits of the whole model. Raises GroupLost once a rank is gone."""
        return self.begin(batch)()

    def begin(self, batch: FlatBatch) -> Callable[[], torch.Tensor]:
        """Compute rank 0's part of a step; return a function that waits for the others and returns
        the logits.

        With stages, the next step may begin before that function is called; call it for each step,
        in order, from one thread. Both raise GroupLost once a rank is gone.
        """
        sampled = len(batch.sample_rows)
        with self._turn, self._together():
            self._give(batch_bytes(batch))
            made = self._model.compute(batch)

        def end() -> torch.Tensor:
            with self._together():
                return self._model.logits(sampled) if made is None else made

        return end

    def move(self, moves: Moves) -> None:
        """Copy blocks in every rank between two steps, as `HostKv.move` does; return when all ranks
        have done it. The method may be called in any thread. Raises GroupLost once a rank is gone.
        """
        with self._turn, self._together():
            self._give(moves_bytes(moves))
            self._model.move(moves)
            for rank, process in enumerate(self._others, 1):
                try:
                    said = line_of(process, self._step_s, "copied its KV").rstrip()
                except RankStuck as error:
                    raise GroupLost(f"rank {rank} {error}") from error
                if said != MOVED:
                    raise GroupLost(f"rank {rank} ended while it copied its KV")

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Mark the group as lost if the block fails, because the ranks would then be in different
        steps.
        """
        if self._lost:
            raise GroupLost(self._lost)
        try:
            yield
        except BaseException as error:
            why = str(error) if isinstance(error, GroupLost) else f"{error or type(error).__name__}"
            self._lost = f"the ranks no longer work together: {why}"
            if isinstance(error, OSError | RuntimeError):
                raise GroupLost(self._lost) from error
            raise

    def _give(self, data: bytes) -> None:
        for rank, process in enumerate(self._others, 1):
            if process.poll() is not None:
                raise GroupLost(f"rank {rank} ended with code {process.returncode}")
            try:
                give(process, data, self._step_s)
            except RankStuck as error:
                raise GroupLost(f"rank {rank} {error}") from error

    def close(self) -> None:
        """Let the other ranks end, and leave the group. The ranks of a lost group wait for each
        other, so the method does not wait for them.
        """
        if self._lost:
            self._kill()
        for process in self._others:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except OSError:
                log.debug("rank process %d was gone already", process.pid)
        with ThreadPoolExecutor(max(1, len(self._others))) as threads:
            list(threads.map(_ended, self._others))
        self._model.close()

    def _kill(self) -> None:
        for process in self._others:
            process.kill()
            process.wait()


def _ready_line(rank: int, process: subprocess.Popen[bytes]) -> bytes:
    try:
        return line_of(process, LOAD_S, "loaded")
    except RankStuck as error:
        raise GroupLost(f"rank {rank} {error}") from error


def _fulfil(made: Future[RankModel], make: Callable[[], RankModel]) -> None:
    try:
        made.set_result(make())
    except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
        made.set_exception(error)


def _start(spec: RankSpec) -> subprocess.Popen[bytes]:
    """Start the process of another rank; its log goes to the same place as the log of
    this process.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "engine.runner.ranks",
        msgspec.json.encode(spec).decode(),
    ]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _ended(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        log.warning("a rank did not end in %.0f s and was killed", END_S)
        process.kill()
        process.wait()


def _free_port() -> int:
    """Return a free port on loopback for the store at which ranks meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
