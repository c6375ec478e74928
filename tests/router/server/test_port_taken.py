"""Tests of a port that another process uses: the error is one line with the remedy, whichever part
tried to listen.
"""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from router.server.sockets import cannot_listen, listening_at

SAYS = "address already in use: stop what listens there, or choose another port"


def test_the_error_for_the_routers_own_socket_has_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use") as caught:
            listening_at("127.0.0.1", port)
    said = str(cannot_listen("127.0.0.1", port, caught.value))
    assert said.startswith(f"cannot listen on 127.0.0.1, port {port}: {SAYS}")


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_error_for_a_socket_of_the_event_loop_has_the_remedy(loop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, asyncio.Runner(loop_factory=loop) as run:
        port = taken.getsockname()[1]

        async def listen() -> None:
            made = asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", port)
            await made

        with pytest.raises(OSError, match="in use") as caught:
            run.run(listen())
    assert SAYS in str(cannot_listen("127.0.0.1", port, caught.value))
