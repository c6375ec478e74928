"""Defines the interface for a protocol other than OpenAI's, whose requests are routed like all
others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router.body.paths import Path
from router.http.messages import Answer, Request
from router.request.prompts import Shape

Header = Callable[[str], str | None]  # the value of a request's header, by its name


class Target(Protocol):
    """The model and the kind of call that a request names. Lifetime: request."""

    @property
    def model(self) -> str:
        """The name of the requested model."""

    @property
    def path(self) -> Path:
        """The row of the path table, which says how to route the request and read its answers."""

    def scanner(self, header: Header, apart: str | None = None) -> Shape:
        """Return the function that reads the request's body. `apart` is the name of a model that
        shares a server with another model but has its own cache.
        """


class Dialect(Protocol):
    """A protocol with paths of its own at the client port. Lifetime: process."""

    def has(self, path: str) -> bool:
        """Return True if a decoded path belongs to this protocol."""

    def target_of(self, path: str) -> Target | None:
        """Return the model and call that a path of this protocol names; None if the path does not
        ask for inference.
        """

    async def answer(self, request: Request) -> Answer:
        """Return the answer to a call that is not inference. Raises ClientError if the call is not
        valid.
        """

    def error(self, path: str, body: bytes) -> bytes:
        """Return the body of one of the router's errors in the form that clients of this protocol
        read.
        """
