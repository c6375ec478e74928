"""Tests of a reload: a new log level applies at once, and an invalid file changes nothing."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.live.stack import Stack, running, until


async def reload(stack: Stack, says: str) -> None:
    """Send SIGHUP to the router and wait until its log has this message once more than before."""
    log = stack.router.log
    before = log.read_text().count(says)
    stack.router.process.send_signal(signal.SIGHUP)

    async def logged() -> bool:
        return log.read_text().count(says) > before

    await until(logged, says)


async def test_a_reload_changes_the_log_level_and_an_invalid_file_changes_nothing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("log_level: info\n")
    async with running(tmp_path, router=["--config", str(file)]) as stack:
        file.write_text("log_level: loud\nexplain: false\n")
        await reload(stack, "reload refused, the old configuration stays")
        body = {"model": "tiny", "prompt": [1], "max_tokens": 1}
        asked = {"x-warmroute-explain": "1"}
        url = f"{stack.url}/v1/completions"
        async with stack.http.post(url, json=body, headers=asked) as reply:
            assert "x-warmroute-explain" in reply.headers
        file.write_text("log_level: info\nseed: 5\nexplain: false\n")
        await reload(stack, "not changed while running: seed:")
        async with stack.http.post(url, json=body, headers=asked) as reply:
            assert "x-warmroute-explain" not in reply.headers
        file.write_text("log_level: warning\nexplain: true\n")
        stack.router.process.send_signal(signal.SIGHUP)

        async def explained() -> bool:
            async with stack.http.post(url, json=body, headers=asked) as reply:
                return "x-warmroute-explain" in reply.headers

        await until(explained, "the reload")
        assert "changed: log_level" not in stack.router.log.read_text(), "said at the new level"
