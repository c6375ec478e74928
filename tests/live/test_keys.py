"""Tests of API keys over real HTTP: which clients may send requests, and that no key is
ever shown.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from tests.live.api_engine import api_engine
from tests.live.commands import output_of
from tests.live.stack import MODEL, misbehaving, running

KEY, OTHER = "sk-aaaaaaaaaaaaaaaa", "sk-bbbbbbbbbbbbbbbb"


async def test_inference_paths_require_keys_and_no_log_shows_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# tenants\n{KEY} blue\n{OTHER} green  # another\n")
    router = ["--api-keys-file", str(keys), "--log-level", "debug"]
    async with running(tmp_path, workers=1, router=router) as stack:

        async def ask(headers: dict[str, str]) -> tuple[int, str]:
            body = {"model": MODEL, "prompt": [1], "max_tokens": 1}
            url = f"{stack.url}/v1/completions"
            async with stack.http.post(url, json=body, headers=headers) as reply:
                return reply.status, await reply.text()

        for key in (KEY, OTHER):
            assert (await ask({"Authorization": f"Bearer {key}"}))[0] == 200
        assert (await ask({"Authorization": f"bearer  {KEY}"}))[0] == 200
        wrong = [
            {},
            {"Authorization": "Bearer"},
            {"Authorization": f"Basic {KEY}"},
            {"Authorization": f"Bearer {KEY}x"},
            {"x-tenant": "blue"},  # not from a trusted peer
        ]
        for headers in wrong:
            status, text = await ask(headers)
            assert status == 401, headers
            assert "invalid_api_key" in text
            assert KEY not in text
        async with stack.http.get(f"{stack.url}/health") as reply:
            assert reply.status == 200
        assert await stack.metric("warmroute_client_errors_total") == len(wrong)
        await stack.assert_idle()
        log = stack.router.log.read_text()
        assert KEY not in log
        assert OTHER not in log


async def test_a_trusted_peer_names_the_tenant_without_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} blue\n")
    router = ["--api-keys-file", str(keys), "--trusted-peers", "127.0.0.0/8"]
    async with running(tmp_path, workers=1, router=router) as stack:
        assert (await stack.complete([1], headers={"x-tenant": "green"}))[0] == 200
        assert (await stack.complete([1]))[0] == 401


@pytest.mark.parametrize("relay", ["auto", "python"])
async def test_workers_get_the_authenticated_tenant_and_not_the_clients_header(
    tmp_path: Path, relay: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} blue\n{OTHER} grün\n")
    router = ["--api-keys-file", str(keys), "--relay", relay]
    async with (
        running(tmp_path, workers=1, router=router) as stack,
        api_engine(MODEL, "/v1/responses") as engine,
    ):
        await stack.add(engine.url)
        for key in (KEY, OTHER):
            headers = {"Authorization": f"Bearer {key}", "X-Tenant": "mallory"}
            body = {"model": MODEL, "input": "hi", "max_output_tokens": 1}
            url = f"{stack.url}/v1/responses"
            async with stack.http.post(url, json=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
        told = [
            [value for name, value in headers.items() if name.lower() == "x-tenant"]
            for _, _, headers in engine.asked
        ]
        assert told == [["blue"], [f"sha256-{sha256('grün'.encode()).hexdigest()}"]]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (f"{KEY}\n".encode(), "keys:1"),
        (f"{KEY} blue\n{KEY} green\n".encode(), "keys:2"),
        (f"{KEY} blue\n".encode() + b"\xff\xfe", "UTF-8"),
    ],
)
async def test_an_invalid_key_file_ends_the_start_and_the_error_shows_no_key(
    tmp_path: Path, content: bytes, says: str
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    arguments = ["serve", "--port", "0", "--admin-port", "0", "--api-keys-file", str(file)]
    status, text = await output_of(*arguments)
    assert status == 2, text
    assert says in text
    assert KEY not in text
    assert "Traceback" not in text


async def test_pages_in_a_browser_cannot_use_the_admin_port(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as stack:
        page = {"Origin": "http://evil.example"}
        async with stack.http.post(f"{stack.admin}/workers/0/drain", headers=page) as reply:
            assert reply.status == 403
        async with stack.http.post(f"{stack.admin}/workers", data=b'"http://x"') as reply:
            assert reply.status == 415
        assert (await stack.row(0))["state"] == "ready"
        async with stack.http.post(f"{stack.admin}/workers/0/drain") as reply:
            assert (await reply.json())["state"] == "draining"


async def test_a_key_of_the_router_does_not_reach_the_worker(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} blue\n")
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    for router, reaches in (([], True), (["--api-keys-file", str(keys)], False)):
        heads: list[bytes] = []
        async with (
            running(tmp_path, workers=0, router=router) as stack,
            misbehaving(answer, heads=heads) as (url, _),
        ):
            await stack.add(url)
            headers = {"Authorization": f"Bearer {KEY}"}
            assert (await stack.complete([1], headers=headers))[0] == 200
        (head,) = heads
        assert (KEY.encode() in head) is reaches


async def test_tritons_paths_show_a_key_only_its_own_models(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} blue models={MODEL}\n{OTHER} green models=another\n")
    async with running(tmp_path, workers=1, router=["--api-keys-file", str(keys)]) as stack:

        async def seen(key: str) -> tuple[list[str], list[str]]:
            headers = {"Authorization": f"Bearer {key}"}
            index, statistics = f"{stack.url}/v2/repository/index", f"{stack.url}/v2/models/stats"
            async with stack.http.post(index, headers=headers) as reply:
                names = [one["name"] for one in await reply.json()]
            async with stack.http.get(statistics, headers=headers) as reply:
                return names, [one["name"] for one in (await reply.json())["model_stats"]]

        assert await seen(KEY) == ([MODEL], [MODEL])
        assert await seen(OTHER) == ([], [])
