"""The parts that make token ids, built from a configuration: tokenizer, memo, reader, checks."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import aiohttp
import msgspec

from engine.wire.memo import MemoEncoder
from router.config.schema import Config
from router.fleet_io.manager import FleetManager
from router.http.prompts import PromptReader
from router.http.token_check import TokenCheck
from router.http.token_probe import ProbeTerms, TokenProbe


class Tokenizing:
    """Lifetime: process. `config` gives the configuration of the moment.

    Raises ValueError for a tokenizer that cannot be used.
    """

    def __init__(
        self,
        config: Callable[[], Config],
        executor: Executor,
        fleet: FleetManager,
        http: aiohttp.ClientSession,
    ) -> None:
        given = config()
        encoder = encoder_of(given)
        self.check = TokenCheck(time.monotonic, lambda: config().intervals.token_recheck_s)
        self.reader = PromptReader(
            encoder,
            executor,
            time.time,
            given.limits.inflight_requests,
            self.check,
            drops_unused_tools=given.chat_drops_unused_tools,
        )
        self._probe: TokenProbe | None = None
        if encoder is not None:
            self._probe = TokenProbe(
                http,
                fleet,
                encoder,
                self.check,
                time.monotonic,
                time.time,
                lambda: _probe_terms(config()),
            )

    async def run(self) -> None:
        """Ask workers for their ids of fixed prompts, for ever; returns where nobody is to ask."""
        if self._probe is not None:
            await self._probe.run()


def _probe_terms(config: Config) -> ProbeTerms:
    intervals = config.intervals
    return ProbeTerms(intervals.health_s, config.timeouts.probe_s, intervals.token_recheck_s)


def encoder_of(config: Config) -> MemoEncoder | None:
    """The tokenizer and its memo; None without one. Raises ValueError where it cannot be used."""
    if config.tokenizer is None:
        return None
    from engine.wire.hf import HfTokenizer  # brings tokenizers and jinja2, needed here only

    defaults = msgspec.json.decode(config.chat_template_kwargs, type=dict)
    try:
        tokenizer = HfTokenizer(Path(config.tokenizer), config.chat_content_format, defaults)
    except OSError as error:
        raise ValueError(f"tokenizer: {error}") from error
    return MemoEncoder(tokenizer, tokenizer, config.limits.token_memo_bytes)
