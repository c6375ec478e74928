"""Gets the token ids of prompts from renderers, and remembers those of earlier turns of
conversations.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from router.body.scan import LONG_BYTES
from router.engines.render_way import Rendered
from router.tokens.renderers import Renderers
from router.tokens.turns import BYTES_A_TOKEN, KnownTurn, RequestKeys, TurnMemo

log = logging.getLogger(__name__)

T = TypeVar("T")
InThread = Callable[[Callable[[], T]], Awaitable[T]]
SOURCES = ("renderer", "memo", "beginning", "text")  # of which prompts of the renderers were made

# A turn with a shorter body waits for its renderer, as its answer comes within some milliseconds.
_WAITS_BELOW_BYTES = 1 << 15
_BESIDE = 64  # most calls that run in the background or wait to
# A call waits so long after its request: the worker that renders may be computing the answer.
_BESIDE_AFTER_S = 1.0


class RenderRequest(NamedTuple):
    """A request whose prompt a renderer shall turn into token ids. Lifetime: request."""

    path: str
    body: bytes  # as it came
    model: str  # as asked for
    salt: str | None


class RenderedPrompt(NamedTuple):
    """The token ids of all prompts of a request, or of the beginning of its only prompt. Lifetime:
    request.
    """

    rendered: Sequence[Rendered]
    renderer: str = ""  # whose count of tokens it is; empty: nobody counted all of them
    rest_tokens: int = 0  # behind the beginning, estimated; 0: the prompt is whole


class RenderedPrompts:
    """Gets the token ids of requests' prompts from renderers. Lifetime: process.

    The next turn of a long conversation does not wait for its renderer: it is placed by the token
    ids of its beginning, while a separate call renders the whole prompt for the turn after it.
    """

    def __init__(self, renderers: Renderers, memo: TurnMemo) -> None:
        self._renderers = renderers
        self._memo = memo
        self._beside: dict[bytes, asyncio.Task[None]] = {}  # by the request's key
        self.sources: Counter[str] = Counter()

    @property
    def memo_bytes(self) -> int:
        """The memory that remembered prompts use, in bytes."""
        return self._memo.bytes

    def can(self, asked: RenderRequest, media: bool = False) -> bool:
        """Return True if at least one renderer can render this request now."""
        return self._renderers.renders(asked.model, asked.path, media)

    async def of(
        self, asked: RenderRequest, in_thread: InThread[RequestKeys]
    ) -> RenderedPrompt | None:
        """Return the token ids of a request's prompts; None if no renderer returns them in time.
        `in_thread` runs a function in a thread for long bodies.
        """
        found = await self._of(asked, in_thread)
        if found is None:
            self.sources["text"] += 1
        return found

    async def _of(
        self, asked: RenderRequest, in_thread: InThread[RequestKeys]
    ) -> RenderedPrompt | None:
        def keys() -> RequestKeys:
            return self._keys(asked)

        # Only the keys are made in a thread: the memo changes on the event loop alone.
        long = len(asked.body) >= LONG_BYTES
        turn = self._memo.look(*(await in_thread(keys) if long else keys()))
        if turn.whole is not None:
            self.sources["memo"] += 1
            return RenderedPrompt(turn.whole.rendered, turn.whole.renderer)
        if len(asked.body) >= _WAITS_BELOW_BYTES and self._renderers.has_events(asked.model):
            beginning = turn.beginning(self._memo.quarter)
            if beginning is not None:
                self.sources["beginning"] += 1
                self._render_beside(asked, turn)
                return RenderedPrompt([beginning], rest_tokens=turn.rest_bytes // BYTES_A_TOKEN + 1)
        return await self._render(asked, turn)

    async def _render(self, asked: RenderRequest, turn: KnownTurn) -> RenderedPrompt | None:
        found = await self._renderers.render(asked.model, asked.path, asked.body, turn.has_media)
        if found is None:
            return None
        rendered, renderer = found
        self._memo.keep(turn, rendered, renderer)
        self.sources["renderer"] += 1
        return RenderedPrompt(rendered, renderer)

    def _render_beside(self, asked: RenderRequest, turn: KnownTurn) -> None:
        key = turn.keys[-1]
        if key in self._beside or len(self._beside) >= _BESIDE:
            return

        async def render() -> None:
            try:
                await asyncio.sleep(_BESIDE_AFTER_S)
                media = turn.has_media
                found = await self._renderers.render(
                    asked.model, asked.path, asked.body, media, waited_for=False
                )
                if found is not None:
                    self._memo.keep(turn, *found)
            except Exception:  # a defect here must not pass unseen
                log.exception("a prompt could not be rendered beside its request")
            finally:
                del self._beside[key]

        self._beside[key] = asyncio.create_task(render(), name="render beside a request")

    def _keys(self, asked: RenderRequest) -> RequestKeys:
        salt = "" if asked.salt is None else f"salt {asked.salt}"
        name = f"{self._renderers.version(asked.model)} {len(asked.model)} {asked.model} {salt}"
        return self._memo.keys_of(asked.body, asked.path, name)

    async def close(self) -> None:
        """Cancel the calls to renderers for which no request waits."""
        for task in list(self._beside.values()):
            task.cancel()
        await asyncio.gather(*self._beside.values(), return_exceptions=True)
