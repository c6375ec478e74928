"""The reader of prompts with its tokenizer, and the check that workers read them alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

import aiohttp

from router.fleet.manager import FleetManager
from router.request.prompts import PromptReader
from router.tokens.check import TokenCheck
from router.tokens.encoders import TokenizerTerms, encoders_of
from router.tokens.probe import ProbeTerms, TokenProbe


class Tokenizing:
    """Reads prompts, and checks that workers read them alike. Lifetime: process.

    Raises ValueError for a tokenizer that cannot be used.
    """

    def __init__(
        self,
        terms: TokenizerTerms,
        probing: Callable[[], ProbeTerms],
        threads: tuple[Executor, Executor],
        fleet: FleetManager,
        http: aiohttp.ClientSession,
    ) -> None:
        """`threads`: where prompts are tokenized, and where long bodies are read."""
        encoders = encoders_of(terms)
        self.check = TokenCheck(time.monotonic, lambda: probing().recheck_s)
        self.reader = PromptReader(
            encoders,
            threads[0],
            time.time,
            terms.waiting_requests,
            self.check,
            drops_unused_tools=terms.drops_unused_tools,
            long=threads[1],
            kind_of=partial(kind_of, fleet),
        )
        self._probe: TokenProbe | None = None
        if encoders is not None:
            self._probe = TokenProbe(
                http,
                fleet,
                encoders,
                self.check,
                time.monotonic,
                time.time,
                probing,
            )

    async def run(self) -> None:
        """Ask workers for their ids of fixed prompts, for ever; returns where nobody is to ask."""
        if self._probe is not None:
            await self._probe.run()


def kind_of(fleet: FleetManager, model: str) -> str | None:
    """Return the kind of engine that serves a model; None if there are several, or none."""
    known = [member.recognized for member in fleet.members.values() if member.recognized]
    kinds = {one.kind for one in known if model in one.facts.models}
    return kinds.pop() if len(kinds) == 1 else None
