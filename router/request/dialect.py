"""The interface of a protocol other than OpenAI's, whose requests are routed like all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router.body.paths import Path
from router.http.messages import Answer, Request
from router.request.prompts import Shape

Header = Callable[[str], str | None]  # the value of a request's header, by its name


class Target(Protocol):
    """The model and the call that a request names. Lifetime: request."""

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def path(self) -> Path:
        """The row of the table of paths, which says how to route the request and read its
        answers.
        """

    def scanner(self, header: Header, apart: str | None = None) -> Shape:
        """Return the reader of the request's body. `apart` is the name of a model that shares a
        server with another and has a cache of its own.
        """


class Dialect(Protocol):
    """A protocol with paths of its own at the client port. Lifetime: process."""

    def has(self, path: str) -> bool:
        """Return True if a decoded path belongs to this protocol."""

    def target_of(self, path: str) -> Target | None:
        """Return the inference that a path of this protocol asks for; None if it asks for another
        call.
        """

    async def answer(self, request: Request) -> Answer:
        """Return the answer to a call that is not inference. Raises ClientError if the call is not
        valid.
        """

    def error(self, path: str, body: bytes) -> bytes:
        """Return an error of the router in the form that clients of this protocol read."""
