"""Keeps track of the servers that make token ids for the router, and of whether they are usable.

A renderer is a worker whose engine can render prompts, or a server that the configuration names.
Each must render a small chat before it is used. A renderer that fails several times in a row is not
used until it renders that chat again, which is tried at most ten seconds later. A renderer that
refuses, because it was started without the necessary flag, is tried again after `recheck_s`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
import msgspec

from engine.wire.events import WireError
from router.engines.adapter import decoded, fetch
from router.engines.render_way import CHATS, NotRenderedError, Rendered, RenderWay
from router.engines.rendering import LlamaCppRender, SglangRender, VllmRender
from router.engines.table import OPENAI, adapter_of
from router.engines.vllm import WARMROUTE
from router.fleet.manager import FleetManager
from router.fleet.recognize import Recognized
from router.tokens.check import TokenCheck
from router.tokens.render_calls import RenderCalls, RenderRefusedError, RenderTerms

log = logging.getLogger(__name__)

RenderState = Literal["none", "able", "refused", "failing", "differs"]
# "suspect": it failed several times in a row, and the next probe says whose fault that is.
_Status = Literal["new", "able", "suspect", "refused", "failing"]
_ASKED = ("able", "suspect")

_FAILURES_OUT = 3  # in a row
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0
_SORT_S = 0.1  # between two sortings of all renderers at the least
_LOOKED_AT = 8  # renderers of a model, for one request
_NOT_THERE = frozenset({401, 403, 404, 405})
_MAX_GIVEN_MODELS = 1_024
_SHOWN_PATHS = 4
_SHOWN_CHARACTERS = 200  # of an error


@dataclass(slots=True, eq=False)
class Renderer:
    """One server that may be able to render prompts. Lifetime: as long as it is a worker, or
    configured.
    """

    url: str
    kind: str  # of the engine whose prompts it renders
    way: RenderWay
    models: Sequence[str]  # the base model first
    of: object  # its recognition result as a worker; None: the configuration names it
    model_path: str | None = None  # its own name of the model, by which it names images
    status: _Status = "new"
    failures: int = 0  # in a row
    again_s: float = 0.0  # when it is probed next
    pause_s: float = _PAUSE_S
    in_flight: int = 0


@dataclass(slots=True)
class _RendererPool:
    """The renderers for one model. Lifetime: until the list of workers or renderers changes."""

    given: list[Renderer] = field(default_factory=list)  # by the configuration: asked first
    workers: list[Renderer] = field(default_factory=list)
    kind: str | None = None  # of its workers
    has_events: bool = False  # some of its workers publish KV events
    start: int = 0  # where the next request begins to look
    model_paths: frozenset[str] = frozenset()  # its workers' own names of the model
    recognized: Sequence[object] = ()  # its workers' engines, as they were recognized
    version: int = 0  # how often these have changed

    @property
    def renderers(self) -> list[Renderer]:
        """All renderers of the model."""
        return [*self.given, *self.workers]

    def names_images(self, one: Renderer) -> bool:
        """Return False if the renderer's identifiers of images differ from those of the model's
        workers.
        """
        known = one.model_path is not None and bool(self.model_paths)
        return one.way.has_media and (not known or one.model_path in self.model_paths)


class _GivenCard(msgspec.Struct):
    id: str
    owned_by: str | None = None
    parent: str | None = None  # the base model of a LoRA adapter
    root: str | None = None


class _GivenCards(msgspec.Struct):
    data: list[_GivenCard]


class Renderers:
    """Finds the servers that render prompts, and sends requests to the usable ones. Lifetime:
    process.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        fleet: FleetManager,
        clock: Callable[[], float],
        terms: Callable[[], RenderTerms],
        has_tokenizer: bool = True,
    ) -> None:
        """Start without renderers. `has_tokenizer` True means that the router can also make token
        ids itself.
        """
        self._http = http
        self._fleet = fleet
        self._clock = clock
        self._terms = terms
        self._has_tokenizer = has_tokenizer
        self._known: dict[str, Renderer] = {}  # by URL
        self._pools: dict[str, _RendererPool] = {}  # by model
        self._sorted_s = -math.inf
        self._logged_flags: set[str] = set()  # flags that the log has named
        self._seen: list[tuple[object, object]] = []  # the workers and settings of the last look
        self.calls = RenderCalls(http, terms)
        self.check = TokenCheck(
            clock,
            lambda: terms().recheck_s,
            "rendered prompts of %r are placed by text from now on: %s",
        )

    async def run(self) -> None:
        """Look for new renderers and probe them, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._terms().every_s)

    async def look(self) -> None:
        """Apply changes of the workers and of the configuration, and probe the renderers whose
        probe is due.
        """
        self._follow()
        now_s = self._clock()
        due = [
            one
            for one in self._known.values()
            if (one.status != "able" or one.of is None) and now_s >= one.again_s
        ]
        outcomes = await asyncio.gather(*map(self._probe, due), return_exceptions=True)
        for one, error in zip(due, outcomes, strict=True):
            if isinstance(error, Exception):  # a defect here must not end the router
                log.error("renderer %s: its probe broke", one.url, exc_info=error)
                self._probe_failed(one, error)
        self._sort()
        self._warn_of_text()

    def _follow(self) -> None:
        terms = self._terms()
        wanted: dict[str, Renderer] = {}
        for url in terms.urls:
            known = self._known.get(url)
            if known is None or known.of is not None:
                known = Renderer(url, "", VllmRender(), (), None)
            wanted[url] = known
        for member in self._fleet.members.values() if terms.workers else ():
            seen = member.recognized
            if seen is None or not member.ready or member.spec.url in wanted:
                continue
            way = adapter_of(seen.kind).render
            if way is None:
                continue
            url, known = member.spec.url, self._known.get(member.spec.url)
            if known is None or known.of is not seen:
                known = Renderer(url, seen.kind, way, seen.facts.models, seen, seen.model_path)
            wanted[url] = known
        for url, one in self._known.items():
            if wanted.get(url) is not one:  # another engine may count as it does
                self.check.drop([_name(model, url) for model in one.models])
        self._known = wanted

    def _sort(self) -> None:
        """Update the list of each model's renderers, if workers or renderers have changed."""
        members = [m for m in self._fleet.members.values() if m.recognized is not None]
        seen: list[tuple[object, object]] = [(m.recognized, m.ready) for m in members]
        seen += [(one, one.models) for one in self._known.values()]
        self._sorted_s = self._clock()
        if len(seen) == len(self._seen) and all(
            one[0] is other[0] and one[1] == other[1]
            for one, other in zip(seen, self._seen, strict=True)
        ):
            return
        self._seen = seen
        renderers: dict[str, list[Renderer]] = {}
        for renderer in self._known.values():
            for model in renderer.models:
                renderers.setdefault(model, []).append(renderer)
        serving: dict[str, list[Recognized]] = {}
        waiting: dict[str, list[Recognized]] = {}  # engines of workers that are not ready
        for member in members:
            if member.recognized is not None:
                into = serving if member.ready else waiting
                for model in member.recognized.facts.models:
                    into.setdefault(model, []).append(member.recognized)
        self._pools = {
            model: self._pool(model, of, waiting.get(model, ()), renderers.get(model, ()))
            for model, of in serving.items()
        }

    def _pool(
        self,
        model: str,
        of: Sequence[Recognized],
        waiting: Sequence[Recognized],
        renderers: Iterable[Renderer],
    ) -> _RendererPool:
        """Return the renderers for a model. `of` are the engines of its ready workers, and
        `waiting` those of its other workers.
        """
        kinds = {one.kind for one in of}
        pool = _RendererPool(has_events=any(one.facts.has_events for one in of))
        pool.recognized = [*of, *waiting]
        former = self._pools.get(model)
        if former is not None:
            known = set(map(id, former.recognized))
            pool.start = former.start
            pool.version = former.version + any(id(one) not in known for one in pool.recognized)
        if len(kinds) > 1:  # each kind of engine makes prompts in its own way
            return pool
        (pool.kind,) = kinds
        for one in renderers:
            if one.kind == pool.kind:
                (pool.given if one.of is None else pool.workers).append(one)
        pool.model_paths = frozenset(one.model_path for one in of if one.model_path is not None)
        self._warn_of_names(model, pool)
        return pool

    def _warn_of_text(self) -> None:
        """Log a warning, once for each model, if its KV events are read but neither the router nor
        a renderer makes its token ids.
        """
        for model, pool in self._pools.items():
            told, (state, flag) = f"text of {model}", self.state(model)
            if self._has_tokenizer or not pool.has_events or told in self._logged_flags:
                continue
            way = adapter_of(pool.kind).render if pool.kind else None
            joined = state == "none" and self._terms().workers and way is not None
            if joined or state not in ("none", "refused"):  # or it is probed at the next look
                continue
            self._logged_flags.add(told)
            line = "the router has no tokenizer for %r: it matches text prompts only approximately "
            line += "and cannot use the workers' KV events for them; set `tokenizer` to the folder "
            line += "with the model's tokenizer.json%s"
            log.warning(line, model, f", or start the engines as `{flag}`" if flag else "")

    def _warn_of_names(self, model: str, pool: _RendererPool) -> None:
        for one in pool.renderers:
            told = f"images of {_name(model, one.url)}"
            if pool.names_images(one) or not one.way.has_media or told in self._logged_flags:
                continue
            self._logged_flags.add(told)
            line = "renderer %s names images by its model %r, workers of %r by %s: chats with "
            line += "images are placed by text; start them with one --model"
            workers = ", ".join(map(repr, sorted(pool.model_paths)[:_SHOWN_PATHS]))
            log.warning(line, one.url, one.model_path, model, workers)

    async def _probe(self, one: Renderer) -> None:
        if one.of is None and not await self._found(one):
            return
        model = next(iter(one.models), "")
        chat = {"model": model, "messages": [{"role": "user", "content": "a"}]}
        try:
            async with asyncio.timeout(self._terms().probe_s):
                await one.way.render(self.calls.post(one.url, 0), CHATS, msgspec.json.encode(chat))
        except RenderRefusedError as error:
            if error.status in _NOT_THERE:
                self._refused(one, error.status)
                return
        except (aiohttp.ClientError, OSError, WireError, TimeoutError) as error:
            self._probe_failed(one, error)
            return
        if one.status == "failing":
            log.info("renderer %s answers again", one.url)
        one.status, one.failures = "able", 0
        one.again_s = self._clock() + self._terms().recheck_s  # where it is asked for its models

    async def _found(self, one: Renderer) -> bool:
        """Ask a configured server for its kind of engine and its models. Return True if
        it answers.
        """
        timeout = aiohttp.ClientTimeout(total=self._terms().probe_s)
        try:
            status, body = await fetch(self._http, f"{one.url}/v1/models", timeout)
            if status != 200:
                raise WireError(f"GET /v1/models answered {status}")
            cards = decoded(body, _GivenCards, "GET /v1/models").data[:_MAX_GIVEN_MODELS]
            for path, kind, way in _GIVEN:
                status, _ = await fetch(self._http, f"{one.url}{path}", timeout)
                if status != 404:
                    one.kind, one.way = kind, way
                    if any(card.owned_by == WARMROUTE.kind for card in cards):
                        one.kind = WARMROUTE.kind
                    break
            else:
                raise WireError("it has no path that makes token ids of chats")
        except (aiohttp.ClientError, OSError, WireError, TimeoutError) as error:
            self._probe_failed(one, error)
            return False
        bases = [card for card in cards if card.parent is None]
        one.models = [card.id for card in (*bases, *(card for card in cards if card.parent))]
        one.model_path = bases[0].root if bases else None
        return True

    def state(self, model: str) -> tuple[RenderState, str | None]:
        """Return whether prompts of a model can be rendered, and the engine's flag that would make
        it possible, or None.
        """
        pool = self._pools.get(model)
        renderers = [] if pool is None else pool.renderers
        if not renderers:
            return "none", None
        if any(self._usable(one, model) for one in renderers):
            return "able", None
        if any(one.status in _ASKED for one in renderers):
            return "differs", None
        if all(one.status == "refused" for one in renderers):
            return "refused", renderers[0].way.flag
        return "failing", None

    def version(self, model: str) -> int:
        """Return a number that changes when the engines of a model may render prompts in another
        way.
        """
        pool = self._pools.get(model)
        return 0 if pool is None else pool.version

    def kind(self, model: str) -> str | None:
        """Return the kind of engine that serves a model; None if several kinds do, or none."""
        pool = self._pools.get(model)
        if pool is None and self._clock() - self._sorted_s >= _SORT_S:  # workers may have joined
            self._sort()
            pool = self._pools.get(model)
        return None if pool is None else pool.kind

    def renders(self, model: str, path: str, media: bool = False) -> bool:
        """Return True if at least one renderer can render a request to `path` now."""
        return self._pick(model, path, media) is not None

    def has_events(self, model: str) -> bool:
        """Return True if workers of a model publish KV events; then a request should wait for exact
        token ids.
        """
        pool = self._pools.get(model)
        return pool is not None and pool.has_events

    def shown(self) -> Iterable[tuple[str, int]]:
        """Return the number of renderers in each status."""
        counts = Counter(one.status for one in self._known.values())
        counts["able"] += counts["suspect"]
        return [(status, counts[status]) for status in ("new", "able", "refused", "failing")]

    async def render(
        self, model: str, path: str, body: bytes, media: bool = False, waited_for: bool = True
    ) -> tuple[Sequence[Rendered], str] | None:
        """Return the token ids of each prompt of a request, and the URL of the renderer that made
        them; None if no renderer did.

        `waited_for` has the same meaning as for `RenderCalls.call`.
        """
        one = self._pick(model, path, media)
        if one is None:
            return None
        one.in_flight += 1
        try:
            rendered = await self.calls.call(one.url, one.way, path, body, media, waited_for)
        except NotRenderedError:
            return None
        except RenderRefusedError as error:
            self._call_refused(one, model, error.status)
            return None
        except TimeoutError:
            if not media:  # whose addresses a client can choose so that nobody answers
                self._call_failed(one, TimeoutError("no answer in time"))
            return None
        except (aiohttp.ClientError, OSError, WireError) as error:
            self._call_failed(one, error)
            return None
        finally:
            one.in_flight -= 1
        if rendered is None:
            return None
        one.failures, one.pause_s = 0, _PAUSE_S
        return rendered, one.url

    def counted(self, url: str, model: str, own: int, reported: int) -> None:
        """Note that a worker counted `reported` tokens in a prompt of which the renderer at `url`
        made `own` tokens.
        """
        self.check.counted(_name(model, url), own, reported)

    def _pick(self, model: str, path: str, media: bool) -> Renderer | None:
        pool = self._pools.get(model)
        if pool is None:
            return None
        pool.start += 1
        for renderers in (pool.given, pool.workers):
            count = len(renderers)
            turn = [renderers[(pool.start + at) % count] for at in range(min(count, _LOOKED_AT))]
            able = [
                one
                for one in turn
                if self._usable(one, model)
                and one.way.takes(path)
                and (not media or pool.names_images(one))
            ]
            if able:
                return min(able, key=lambda one: one.in_flight)
        return None

    def _usable(self, one: Renderer, model: str) -> bool:
        return one.status in _ASKED and self.check.trusts(_name(model, one.url))

    def _refused(self, one: Renderer, status: int) -> None:
        one.status = "refused"
        one.again_s = self._clock() + self._terms().recheck_s
        flag = one.way.flag
        told = f"{one.kind} {flag}"
        if told not in self._logged_flags:
            self._logged_flags.add(told)
            how = f"; {flag} lets it" if flag else ""
            how = "; it wants an API key, which the router has not" if status == 401 else how
            line = "%s makes no token ids of requests (status %d)%s: prompts whose token ids the "
            line += "router cannot make itself are placed by text"
            log.info(line, one.url, status, how)

    def _call_refused(self, one: Renderer, model: str, status: int) -> None:
        if status == 404:  # of the model, or of the path: the probe asks for the base model
            one.models = [name for name in one.models if name != model] or one.models
        if status in _NOT_THERE and one.status == "able":
            one.status, one.again_s = "suspect", self._clock()

    def _call_failed(self, one: Renderer, error: Exception) -> None:
        """Note that a call to a renderer failed.

        A client can send requests whose calls fail. So only a failed connection or a late answer
        counts as the renderer's own fault; after other failures the next probe decides.
        """
        if one.status != "able":  # calls that began before it was left alone
            return
        one.failures += 1
        if one.failures < _FAILURES_OUT:
            return
        if isinstance(error, WireError):
            one.status, one.again_s = "suspect", self._clock()
            return
        log.warning("renderer %s is not asked for now: %s", one.url, _error_text(error))
        one.status = "failing"
        self._pause(one)

    def _probe_failed(self, one: Renderer, error: Exception) -> None:
        if one.status in ("new", "able", "suspect"):
            log.warning("renderer %s makes no token ids: %s", one.url, _error_text(error))
        one.status = "failing"
        self._pause(one)

    def _pause(self, one: Renderer) -> None:
        """Do not use a renderer for a while. The time doubles each time, until the renderer renders
        a request.
        """
        one.again_s = self._clock() + one.pause_s
        one.pause_s = min(2 * one.pause_s, _LONGEST_PAUSE_S)


# A path by which each kind of a configured server is known, asked for by GET: only 404 says that
# it is not there (405: it is there for POST).
_GIVEN: tuple[tuple[str, str, RenderWay], ...] = (
    (f"{CHATS}/render", "vllm", VllmRender()),
    ("/v1/tokenize", "sglang", SglangRender()),
    ("/props", OPENAI.kind, LlamaCppRender()),
)


def _error_text(error: Exception) -> str:
    return str(error)[:_SHOWN_CHARACTERS] or type(error).__name__


def _name(model: str, url: str) -> str:
    return f"{model} by {url}"
