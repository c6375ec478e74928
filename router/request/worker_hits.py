"""Judges how exactly the router knows each worker's cache, and thus the expected hits, from facts
of several parts of the router.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from router.core.core import RouterCore
from router.core.workers.hit_modes import HitFacts, HitVerdict, TokenState, hit_verdict
from router.core.workers.table import Worker
from router.engines.table import adapter_of
from router.events.sources import EventSource, ZmqSource
from router.fleet.member import Member, skipped_events
from router.request.prompts import Prompt
from router.tokens.check import TokenCheck
from router.tokens.renderers import Renderers, RenderState


class WorkerHits:
    """Judges how exact the expected cache hits at workers are. Lifetime: process."""

    def __init__(
        self, core: RouterCore, check: TokenCheck, renderers: Renderers, has_tokenizer: bool
    ) -> None:
        self._core = core
        self._renderers = renderers
        self._check = check
        self._has_tokenizer = has_tokenizer

    def of(self, member: Member, worker: Worker | None) -> HitVerdict | None:
        """Return how exact the expected cache hits at a worker are; None if it is down or not
        recognized.
        """
        if worker is None or member.recognized is None or worker.state == "down":
            return None
        return hit_verdict(self._facts(member, worker))

    def of_request(self, member: Member | None, prompt: Prompt) -> HitVerdict | None:
        """Return how exact the expected cache hits of a request at a worker are; None if the worker
        has left.

        Token ids in the request itself are exact whatever tokenizer there is.
        """
        worker = None if member is None else self._core.workers.get(member.worker_id)
        verdict = None if member is None else self.of(member, worker)
        if member is None or worker is None or verdict is None:
            return verdict
        if prompt.begins:
            return hit_verdict(replace(self._facts(member, worker), tokens="beginning"))
        if prompt.approximate or prompt.encoded:
            return verdict
        return hit_verdict(replace(self._facts(member, worker), tokens="checked"))

    def _facts(self, member: Member, worker: Worker) -> HitFacts:
        recognized = member.recognized
        assert recognized is not None
        kv, slot, flags = worker.kv, worker.slot, adapter_of(recognized.kind).flags
        feed = member.feed
        tokens, render_flag = self._tokens(worker.facts.models[0])
        return HitFacts(
            tokens=tokens,
            render_flag=render_flag,
            is_caching=recognized.caches_prefixes,
            caching_flag=flags.caching,
            has_events=worker.facts.has_events,
            events_none=member.spec.events == "none",
            events_refused=recognized.events_refused,
            events_flag=flags.events,
            guessed=kv.guessed,
            is_connected=feed is None or feed.counters.heard,
            severed=kv.severed,
            known=kv.known,
            resyncing=kv.resyncing,
            has_replay=can_resend(recognized.source),
            replay_flag=flags.replay,
            buffer_flag=flags.buffer,
            forgotten_blocks=kv.evicted_blocks,
            overflows=kv.overflows,
            confidence=float(self._core.columns.hit_confidence[slot]),
            is_hybrid=kv.blocks.is_hybrid,
            has_full_attention=kv.blocks.has_full_attention,
            lower_tier_blocks=worker.kv.resident_blocks - worker.kv.gpu_blocks,
            leaves_out_groups=recognized.leaves_out_groups,
            repeats_last_block=self._core.caches.last_blocks.learned(slot),
            other_windows=0 if feed is None else feed.counters.other_windows,
            skips=skipped_events(member, worker) if worker.facts.has_events else {},
        )

    def _tokens(self, model: str) -> tuple[TokenState, str | None]:
        """Return whether the token ids of a model are exact, and the engine's flag that would make
        them exact, or None.
        """
        local: TokenState = self._check.state(model) if self._has_tokenizer else "none"
        if local in ("checked", "unchecked"):
            return local, None
        state, flag = self._renderers.state(model)
        rendered = _RENDERED[state]
        if rendered is None or (local != "none" and rendered != "checked"):
            return local, None
        return rendered, flag


# The effect of a renderer's state on a model whose token ids the router cannot make itself.
_RENDERED: Mapping[RenderState, TokenState | None] = MappingProxyType(
    {
        "none": None,
        "able": "checked",
        "refused": "refused",
        "failing": "failing",
        "differs": "miscounted",
    }
)


def can_resend(source: EventSource | None) -> bool:
    """Return True if the engine can replay missed events, or send its whole cache."""
    if not isinstance(source, ZmqSource):
        return False
    return source.replay is not None or source.snapshot is not None
