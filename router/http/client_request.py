"""A client's request as its handlers see it, whoever reads the connection."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Headers(Protocol):
    """A request's headers."""

    def get(self, name: str, /) -> str | None:
        """The first value under a name, whose letters count without case."""
        ...


class Writing(Protocol):
    """Whether the client's connection takes more."""

    @property
    def writing_paused(self) -> bool: ...


class Written(Protocol):
    """What the client was given so far."""

    output_size: int  # bytes of the answer

    async def drain(self) -> None:
        """Wait until the client has read. Raises ConnectionError when it is gone."""
        ...


class ClientRequest(Protocol):
    """As much of `aiohttp.web.BaseRequest` as inference needs: the door's own requests are this,
    too. Lifetime: request.
    """

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...  # decoded, without the query
    @property
    def raw_path(self) -> str: ...  # the target as it came
    @property
    def version(self) -> tuple[int, int]: ...
    @property
    def headers(self) -> Headers: ...
    @property
    def raw_headers(self) -> tuple[tuple[bytes, bytes], ...]: ...  # as they came
    @property
    def remote(self) -> str | None: ...  # the peer's address
    @property
    def keep_alive(self) -> bool: ...  # its connection goes on after the answer
    @property
    def transport(self) -> asyncio.Transport | None: ...  # None once the client is gone
    @property
    def protocol(self) -> Writing: ...
    @property
    def writer(self) -> Written: ...
    async def read(self) -> bytes:
        """The whole body."""
        ...
