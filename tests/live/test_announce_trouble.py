"""Tests of what a worker logs when a real Redis does not take its announcement."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.server.announcer import Announce, Announcer
from engine.wire.announcement import Announcement
from tests.live.ports import lasting_port
from tests.live.redis_server import RedisServer, needs_redis
from tests.live.stack import until

ENTRY = Announcement(url="http://127.0.0.1:1")


async def first_log_line(url: str, caplog: pytest.LogCaptureFixture) -> str:
    """Announce a worker at `url` and return the first line of the log about it."""

    async def logged() -> bool:
        return bool(caplog.messages)

    announcing = asyncio.create_task(Announcer(Announce(url, lease_s=1.0), ENTRY).run())
    try:
        await until(logged, "a line in the log")
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
    return caplog.messages[0]


@needs_redis
async def test_a_wrong_or_missing_redis_password_is_reported_without_the_password(
    tmp_path: Path, caplog
) -> None:
    server = RedisServer(tmp_path / "redis", "--requirepass", "right")
    server.start()
    try:
        for login in (":secret@", ""):
            caplog.clear()
            line = await first_log_line(f"redis://{login}127.0.0.1:{server.port}", caplog)
            assert f"not announced at {server.url}, " in line
            assert "refuses the user or password, or asks for one: correct --announce" in line
            assert "tries again" in line
            assert "secret" not in caplog.text
    finally:
        server.kill()


async def test_an_unreachable_redis_is_reported_without_the_password(caplog) -> None:
    line = await first_log_line(f"redis://:secret@127.0.0.1:{lasting_port()}", caplog)
    assert "no answer: does Redis run there?; tries again" in line
    assert "secret" not in caplog.text
