"""Tests of the admin port: its keys, and the host names that it answers to."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.live.hostile.corpus import refused
from tests.live.stack import exchanged, running, until

KEY = "sk-admin-0123456789abcdef0123456789abcdef"


async def test_a_reload_changes_the_host_names_allowed_at_the_admin_port(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("admin_allowed_hosts: [Router-1]\n")
    async with running(tmp_path, workers=0, router=["--config", str(file)]) as stack:

        async def status(host: str) -> int:
            return (await exchanged(stack.admin, "GET /workers", f"Host: {host}"))[0]

        assert await status("router-1:8081") == 200
        assert await status("router-2:8081") == 421
        assert "asked by the name 'router-2:8081' (1 so far)" in stack.router.log.read_text()
        file.write_text("admin_allowed_hosts: [router-2]\n")
        stack.router.process.send_signal(signal.SIGHUP)

        async def renewed() -> bool:
            return await status("router-2:8081") == 200

        await until(renewed, "the names to be those of the new file")
        assert await status("router-1:8081") == 421


async def test_clients_without_an_admin_key_get_401_and_malformed_requests_an_error(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text(f"{KEY} admin\n")
    bearer = {"Authorization": f"Bearer {KEY}"}
    async with running(
        tmp_path, workers=0, router=["--admin-keys-file", str(keys)], headers=bearer
    ) as stack:
        # A page with a rebound name has no key, so it can read nothing under any name.
        for path in ("/workers", "/explain", "/ui/state", "/kv", "/nothing", "/workers/drain"):
            status, body = await exchanged(stack.admin, f"GET {path}", "Host: evil.example")
            assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key"), path
        asked = "Host: router.example", f"Authorization: Bearer {KEY}"
        assert (await exchanged(stack.admin, "GET /workers", *asked))[0] == 200
        for name, status, request in refused():
            got, body = await exchanged(stack.admin, request)
            assert got == (401 if status == 404 else status), (name, body)  # 404s are well-formed
            error = json.loads(body)["error"]
            assert error["message"]
            assert "aiohttp" not in str(error)
