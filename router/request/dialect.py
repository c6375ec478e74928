"""What serving a protocol beside OpenAI's needs to give, so that its requests are routed as any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router.body.paths import Path
from router.http.messages import Answer, Request
from router.request.prompts import Shape

Header = Callable[[str], str | None]  # the value of a request's header, by its name


class Target(Protocol):
    """What a request asks of a model. Lifetime: request."""

    @property
    def model(self) -> str:
        """By its name."""

    @property
    def path(self) -> Path:
        """How it is routed, and how its answers are read."""

    def scanner(self, header: Header, apart: str | None = None) -> Shape:
        """What reads the bodies of such requests. `apart`: a model beside another on its servers,
        with a cache of its own.
        """


class Dialect(Protocol):
    """A protocol with paths of its own at the client port. Lifetime: process."""

    def has(self, path: str) -> bool:
        """Whether a decoded path is one of its own."""

    def target_of(self, path: str) -> Target | None:
        """The inference that a path of its own asks for; None: it asks for something else."""

    async def answer(self, request: Request) -> Answer:
        """The answer to what is no inference. Raises ClientError."""

    def error(self, path: str, body: bytes) -> bytes:
        """An error of the router's own on a path of its, as its clients read errors."""
