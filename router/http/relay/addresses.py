"""A worker's host name as numeric addresses, asked for again from time to time."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from router.http.errors import WorkerError

_KEPT_S = 10.0


class Addresses:
    """Lifetime: worker."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._known: list[str] = []
        self._stale_s = float("-inf")
        try:
            self._numeric = str(ipaddress.ip_address(host))
        except ValueError:
            self._numeric = ""

    def stale(self, now_s: float) -> bool:
        """Whether to ask `fresh`, which awaits, and has nothing new else."""
        return now_s >= self._stale_s

    async def fresh(self, now_s: float, within_s: float) -> list[str] | None:
        """The addresses where they are new or changed, None where they are as last given.

        Raises WorkerError("connect") for a name that never was found, "timeout_connect" where the
        answer takes longer than `within_s`. One that was found before keeps its addresses.
        """
        if not self.stale(now_s):
            return None
        if self._numeric:
            self._stale_s = float("inf")
            return [self._numeric]
        self._stale_s = now_s + _KEPT_S
        try:
            found = await self._found(within_s)
        except WorkerError:
            if self._known:
                return None
            self._stale_s = float("-inf")
            raise
        if found == self._known:
            return None
        self._known = found
        return found

    async def _found(self, within_s: float) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(within_s):
                rows = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except TimeoutError as error:
            message = f"no address within {within_s:g} s"
            raise WorkerError("timeout_connect", message) from error
        except (OSError, UnicodeError) as error:
            raise WorkerError("connect", f"no connection: {error}") from error
        return list(dict.fromkeys(str(row[4][0]).partition("%")[0] for row in rows))
