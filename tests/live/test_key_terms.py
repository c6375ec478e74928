"""Tests over real HTTP of what a key allows: models, priorities, rates, salts; and of the admin
port's keys.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp

from router.keys.key_file import hash_of
from tests.live.commands import output_of
from tests.live.stack import MODEL, Stack, misbehaving, running, until

FREE, RARE, PICKY, ONE = "sk-free-aaaaaaaa", "sk-rare-bbbbbbbb", "sk-picky-cccccc", "sk-one-ddd"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def complete_with_key(stack: Stack, key: str, **fields: Any) -> tuple[int, Any, Any]:
    """Send a completion with this key; return (status, JSON, headers)."""
    body = {"model": MODEL, "prompt": [1] * 20, "max_tokens": 4} | fields
    url = f"{stack.url}/v1/completions"
    async with stack.http.post(url, json=body, headers=bearer(key)) as reply:
        return reply.status, await reply.json(), reply.headers


async def test_a_key_has_the_models_limits_and_priorities_of_its_line(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        f"sha256:{hash_of(FREE).hex()} blue\n"
        f"{RARE} green tokens_per_s=0.1 tokens_burst=30 requests_per_s=5 requests_burst=9\n"
        f"{PICKY} grey models=other-*,{MODEL} priority=2..5\n"
        f"{ONE} grey models=other-*\n"
    )
    async with running(tmp_path, workers=1, router=["--api-keys-file", str(keys)]) as stack:
        status, _, headers = await complete_with_key(stack, FREE)
        assert (status, [h for h in headers if h.startswith("x-ratelimit")]) == (200, [])
        status, _, headers = await complete_with_key(stack, RARE)
        assert status == 200
        assert headers["x-ratelimit-limit-tokens"] == "30"
        # 20 tokens of the prompt and 4 of the answer: the rest is not enough for a second request.
        assert int(headers["x-ratelimit-remaining-tokens"]) == 10
        status, body, headers = await complete_with_key(stack, RARE)
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 100 < int(headers["Retry-After"]) <= 140
        assert 0 < int(headers["retry-after-ms"]) <= 1000 * int(headers["Retry-After"])
        assert headers["x-ratelimit-remaining-tokens"] == "6"
        assert headers["x-ratelimit-limit-requests"] == "9"
        assert (await complete_with_key(stack, PICKY, priority=5))[0] == 200
        status, body, _ = await complete_with_key(stack, PICKY, priority=-3)
        assert (status, body["error"]["code"]) == (403, "priority_not_allowed")
        status, body, _ = await complete_with_key(stack, ONE)
        assert (status, body["error"]["code"]) == (403, "model_not_allowed")
        assert body["error"]["type"] == "permission_error"
        assert await stack.metric('warmroute_tenant_requests_total{tenant="grey"}') == 3
        refused = 'warmroute_tenant_refusals_total{reason="rate_limit_exceeded",tenant="green"}'
        assert await stack.metric(refused) == 1
        assert await stack.metric('warmroute_tenant_tokens_total{of="prompt",tenant="blue"}') == 20
        await _reloads(stack, keys)
        await stack.assert_idle()
        assert all(key not in stack.router.log.read_text() for key in (FREE, RARE, PICKY, ONE))


def rewritten(file: Path, changes: dict[str, str]) -> None:
    text = file.read_text()
    for old, new in changes.items():
        text = text.replace(old, new)
    file.write_text(text)


async def _reloads(stack: Stack, keys: Path) -> None:
    """Check that a changed keys file is used without a restart and that an invalid one changes
    nothing.
    """

    async def answers(key: str, status: int) -> bool:
        return (await complete_with_key(stack, key))[0] == status

    async def logged() -> bool:
        return "keys:4: expected a key and a tenant" in stack.router.log.read_text()

    async def is_known() -> bool:
        return await answers("sk-new", 403)

    rewritten(keys, {f"{ONE} grey": "sk-new #"})
    stack.router.process.send_signal(signal.SIGHUP)
    await until(logged, "the bad file to be told of")
    assert await answers(FREE, 200)
    assert await answers("sk-new", 401)
    rewritten(keys, {"sk-new #": "sk-new grey", "tokens_burst=30": "tokens_burst=31"})
    # Without a signal: the router checks the file from time to time.
    await until(is_known, "the new key")
    assert await answers(ONE, 401)
    assert await answers(RARE, 429)  # its usage is remembered


async def test_isolated_tenants_get_salts_that_no_client_can_set(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{FREE} blue\n{RARE} green\n{ONE} green salt=x\n")
    router = ["--api-keys-file", str(keys), "--tenants-isolate", "true"]
    async with running(tmp_path, workers=1, router=router) as stack:
        prompt = list(range(64))

        async def cached(key: str, **fields: Any) -> int:
            status, body, _ = await complete_with_key(stack, key, prompt=prompt, **fields)
            assert status == 200
            found: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert await cached(FREE) == 0
        assert await cached(FREE) > 0
        assert await cached(RARE) == 0
        assert await cached(RARE) > 0
        assert await cached(ONE) == 0
        assert await cached(FREE, cache_salt="own") == 0
        assert await cached(FREE, cache_salt="own") > 0
        # The router expects what the worker finds: its chains have the same salt.
        hits = await stack.metric("warmroute_expected_hit_tokens_total")
        reported = await stack.metric("warmroute_reported_hit_tokens_total")
        assert hits >= reported > 0


async def test_the_salt_is_appended_as_the_last_field_and_the_rest_stays_unchanged(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{FREE} blue salt=s\n{RARE} green\n")
    async with (
        running(tmp_path, workers=0, router=["--api-keys-file", str(keys)]) as stack,
        misbehaving(ANSWER) as (url, sent),
    ):
        await stack.add(url)
        body = b'{"prompt": [1], "cache_salt":"mine",  "odd" : {"}": 1.50} }\n '
        for key in (FREE, RARE):
            headers = {"Content-Type": "application/json", **bearer(key)}
            address = f"{stack.url}/v1/completions"
            async with stack.http.post(address, data=body, headers=headers) as reply:
                assert reply.status == 200
    salted, plain = sent
    assert plain == body
    rest = body.rindex(b"}")
    assert salted.startswith(body[:rest])
    assert salted.endswith(body[rest:])
    assert json.loads(salted)["cache_salt"] not in ("mine", "s")


async def test_the_admin_port_has_its_own_keys(tmp_path: Path) -> None:
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text(f"{FREE} blue\n")
    admin.write_text(f"{ONE} operators\n")
    router = ["--api-keys-file", str(keys), "--admin-keys-file", str(admin)]
    async with running(tmp_path, workers=1, router=router, headers=bearer(ONE)) as stack:
        async with aiohttp.ClientSession() as stranger:
            for path in ("/workers", "/metrics", "/explain", "/nothing"):
                async with stranger.get(f"{stack.admin}{path}", headers=bearer(FREE)) as reply:
                    assert reply.status == 401, path
                async with stranger.get(f"{stack.admin}{path}") as reply:
                    assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
            async with stranger.get(f"{stack.admin}/health") as reply:
                assert reply.status == 200
        async with stack.http.get(f"{stack.url}/health") as reply:
            assert reply.status == 200
        file = tmp_path / "one"
        file.write_text(f"{ONE}\n")
        command = ["kv", "--admin", stack.admin, "--worker", "0"]
        assert (await output_of(*command))[0] == 2
        assert (await output_of(*command, "--admin-key-file", str(file)))[0] == 0


async def test_a_new_key_works_and_is_shown_once(tmp_path: Path) -> None:
    async def command(*arguments: str, given: bytes = b"") -> tuple[int | None, str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", "keys", *arguments, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate(given)
        return process.returncode, out.decode(), err.decode()

    code, line, told = await command("new", "bot", "--tenant", "ci")
    key = told.split()[-1]
    assert (code, len(key) > 40, key in line) == (0, True, False)
    assert line == f"sha256:{hash_of(key).hex()} ci name=bot\n"
    assert (await command("hash", given=f"{key}\n".encode()))[1] == line.split()[0] + "\n"
    file = tmp_path / "keys"
    file.write_text(line + "plain blue\n- grey weight=2\n")
    expected = "ok: 2 keys, 1 of them in plain text, 1 named tenants\n"
    assert await command("check", str(file)) == (0, expected, "")
    file.write_text(line + key)
    code, said = await output_of("keys", "check", str(file))
    assert (code, ":2: expected" in said, key in said) == (2, True, False)
    assert (await output_of("keys", "new", "two words"))[0] == 2
