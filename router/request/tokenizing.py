"""Combines the reader of prompts and its tokenizer with the checks that workers make the same token
ids.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor

import aiohttp

from router.fleet.manager import FleetManager
from router.request.prompts import PromptReader
from router.tokens.check import TokenCheck
from router.tokens.encoders import TokenizerTerms, encoders_of
from router.tokens.probe import ProbeTerms, TokenProbe
from router.tokens.render_calls import RenderTerms
from router.tokens.rendered_prompts import RenderedPrompts
from router.tokens.renderers import Renderers
from router.tokens.turns import TurnMemo


class Tokenizing:
    """Reads prompts, and checks that workers make the same token ids of them. Lifetime: process.

    Raises ValueError if the tokenizer is unusable.
    """

    def __init__(
        self,
        terms: TokenizerTerms,
        probing: Callable[[], ProbeTerms],
        rendering: Callable[[], RenderTerms],
        threads: tuple[Executor, Executor],
        fleet: FleetManager,
        http: aiohttp.ClientSession,
    ) -> None:
        """Load the tokenizer. `threads` are those in which prompts are tokenized, and those in
        which long bodies are read.
        """
        encoders = encoders_of(terms)
        self.check = TokenCheck(time.monotonic, lambda: probing().recheck_s)
        self.renderers = Renderers(
            http, fleet, time.monotonic, rendering, has_tokenizer=encoders is not None
        )
        self.rendered = RenderedPrompts(self.renderers, TurnMemo(terms.memo_bytes, time.time))
        self.reader = PromptReader(
            encoders,
            threads[0],
            time.time,
            terms.waiting_requests,
            self.check,
            drops_unused_tools=terms.drops_unused_tools,
            long=threads[1],
            rendered=self.rendered,
            kind_of=self.renderers.kind,
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
        """Probe renderers, and the token ids that workers make of fixed prompts, until
        cancelled.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.renderers.run())
            if self._probe is not None:
                tasks.create_task(self._probe.run())

    async def close(self) -> None:
        """Cancel the calls to renderers for which no request waits."""
        await self.rendered.close()
