"""The protocol by which the router asks a renderer of any kind for token ids.

A renderer is a server that makes a request's prompt as its engine would, and returns the token ids
without computing an answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from router.body.scan import Tokens
from router.engines.media import Medium

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_TOKENS = 1 << 24  # of one prompt

# Sends JSON to a path of the renderer, and returns the body of its answer of status 200.
Post = Callable[[str, bytes], Awaitable[bytes]]


class NotRenderedError(Exception):
    """Raised if a renderer does not make the prompt of a request as its engine would."""


class Rendered(NamedTuple):
    """The token ids of one prompt as its engine reads them, and the media in it."""

    ids: Tokens
    media: Sequence[Medium] = ()  # in the order of their places


class RenderWay(Protocol):
    """The protocol of one kind of renderer. Paths are those of OpenAI's API. `flag` is the program
    and the flag with which an engine of this kind renders prompts; None means that every server of
    the kind does.
    """

    @property
    def flag(self) -> str | None: ...
    @property
    def has_media(self) -> bool:
        """True if the renderer's answers have the names and places of the media in a prompt."""

    def takes(self, path: str) -> bool:
        """Return True if requests to `path` can be rendered."""

    async def render(self, post: Post, path: str, body: bytes) -> Sequence[Rendered]:
        """Return each prompt of a request, at least one. Raises NotRenderedError if the renderer
        cannot make the prompt as its engine would, WireError for an invalid answer, and any error
        that `post` raises.
        """
