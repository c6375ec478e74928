"""Makes steps and kernels fail, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.runner.load import Computing, Loaded
from tests.engine.real import loaded


class Breaking(Computing):
    """A model that raises an error or gives NaN at chosen steps, counted from 0."""

    def __init__(self, inner: Computing, fails: set[int], nan: set[int]) -> None:
        super().__init__(inner._transformer, inner.kv)
        self._inner, self._fails, self._nan, self._steps = inner, fails, nan, 0

    def logits(self, batch):
        step, self._steps = self._steps, self._steps + 1
        if step in self._fails:
            raise RuntimeError("out of memory, say")
        logits = self._inner.logits(batch)
        return torch.full_like(logits, torch.nan) if step in self._nan else logits


def breaking(folder: Path, fails: set[int], nan: set[int] = frozenset(), **settings: Any) -> Loaded:
    model = loaded(folder, **settings)
    return replace(model, model=Breaking(model.model, fails, nan))


OPERATORS = ("append", "prefill", "shared_decode")
ALL = (*OPERATORS, "w8a16")


@contextmanager
def failing(name: str, at_call: int, error: Exception) -> Iterator[list[str]]:
    """Make the operator fail from its call `at_call` on; yield the names of all calls."""
    calls: list[str] = []

    def planted(operator: str, run: Any) -> Any:
        def call(*arguments: Any) -> None:
            calls.append(operator)
            if operator == name and calls.count(name) > at_call:
                raise error
            run(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for operator in ALL:
            run = getattr(torch.ops.warmroute, operator)
            patch.setattr(torch.ops.warmroute, operator, planted(operator, run))
        yield calls
