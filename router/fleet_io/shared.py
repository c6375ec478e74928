"""Answers that several workers share: ranks of one engine, whose URL answers for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Shared(Generic[T]):
    """One question and its latest answer. Lifetime: as long as a worker asks it."""

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._at_s: float | None = None
        self._answer: T | None = None
        self._error: Exception | None = None

    async def get(
        self, ask: Callable[[], Awaitable[T]], clock: Callable[[], float], fresh_s: float
    ) -> T:
        """The answer, asked for anew where it is older than `fresh_s`; raises what asking raised.

        Whoever comes while somebody asks waits for that answer. If that one is cancelled, the next
        asks itself.
        """
        async with self._asking:
            if self._at_s is None or clock() - self._at_s > fresh_s:
                self._at_s = self._answer = self._error = None
                try:
                    self._answer = await ask()
                except Exception as error:  # noqa: BLE001 - it is an answer to all
                    self._error = error
                self._at_s = clock()
        if self._error is not None:
            raise self._error
        return self._answer  # type: ignore[return-value]  # set, as there is no error


class Answers:
    """Questions that are being asked, by what is asked. Lifetime: process."""

    def __init__(self) -> None:
        self._shared: WeakValueDictionary[Hashable, Shared[Any]] = WeakValueDictionary()

    def to(self, question: Hashable) -> Shared[Any]:
        """The one shared answer to `question`; whoever asks holds on to it."""
        shared = self._shared.get(question)
        if shared is None:
            shared = self._shared[question] = Shared()
        return shared
