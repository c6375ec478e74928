"""A replica that asks for a lease: `python -m tests.live.lease_holder URL LEASE_S`.

It prints `told TOKEN` when it gets or loses the lease, and `asked TOKEN` for each line it reads.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

from tests.live.stack import WAIT_S

_NOTHING: Mapping[str, str] = MappingProxyType({})


class LeaseHolder:
    """The process of a replica that asks for a lease. Lifetime: test; call `end`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._in, self._out = process.stdin, process.stdout

    @classmethod
    async def start(
        cls, url: str, lease_s: float, environment: Mapping[str, str] = _NOTHING
    ) -> Self:
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.live.lease_holder", url, f"{lease_s:g}"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
            )
        )

    def ask(self) -> None:
        """Ask the replica for its lease's token; the answer is the next `asked` line."""
        self._in.write(b"?\n")

    async def next_line(self) -> tuple[str, int | None]:
        """Return the replica's next line as (`told` or `asked`, token or None if it has
        no lease).
        """
        line = await asyncio.wait_for(self._out.readline(), WAIT_S)
        word, token = line.decode().split()
        return word, None if token == "None" else int(token)

    async def fence(self) -> int | None:
        """Return the lease's token that the replica holds now, or None if it has no lease."""
        self.ask()
        while (said := await self.next_line())[0] != "asked":
            pass
        return said[1]

    async def end(self) -> None:
        """Close the replica's input to end it; kill it if it does not end in time."""
        if self.process.returncode is None:
            self._in.close()
            try:
                await asyncio.wait_for(self.process.wait(), WAIT_S)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()


async def main(url: str, lease_s: float) -> None:
    from tests.router.replicas.replica_support import Replica

    replica = Replica(url, "held", lease_s=lease_s)
    replica.link.start()
    leases = replica.link.leases
    lease = leases.acquire("it", lambda token: print("told", token, flush=True))
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print("asked", lease.fence, flush=True)
    await replica.link.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
