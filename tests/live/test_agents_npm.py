"""Tests of Claude Code, Codex and OpenCode from npm through a real router to a scripted model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from simulator.live.processes import Programs
from tests.live.scripted_model import CHILD, DONE, MODEL, TASK, ScriptedModel
from tests.live.stack import until
from tests.served_app import served_by

pytestmark = pytest.mark.full

ALIAS = "claude-scripted"
RUN_S, INSTALL_S = 180, 400


def of_claude(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    command = ["claude", "-p", TASK, "--model", ALIAS, "--dangerously-skip-permissions"]
    return command, {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "IS_SANDBOX": "1"}


def of_codex(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    lines = [
        f'model = "{MODEL}"',
        'model_provider = "warmroute"',
        "check_for_update_on_startup = false",
        "[model_providers.warmroute]",
        'name = "warmroute"',
        f'base_url = "{url}/v1"',
        'wire_api = "responses"',
        'env_key = "WARMROUTE_KEY"',
        "[analytics]",
        "enabled = false",
    ]
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text("\n".join(lines))
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["codex", "exec", *flags, TASK], {"WARMROUTE_KEY": "none"}


def of_opencode(url: str, home: Path) -> tuple[list[str], dict[str, str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "warmroute",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL}},
    }
    model = f"warmroute/{MODEL}"
    config = {"autoupdate": False, "provider": {"warmroute": provider}, "model": model}
    (folder := home / ".config" / "opencode").mkdir(parents=True)
    (folder / "opencode.json").write_text(json.dumps(config | {"small_model": model}))
    return ["opencode", "run", "--auto", TASK], {"OPENCODE_DISABLE_MODELS_FETCH": "1"}


# package; its script that unpacks its program; how it is run; its header that names an agent
CLIENTS: dict[
    str, tuple[str, str, Callable[[str, Path], tuple[list[str], dict[str, str]]], str]
] = {
    "claude": ("@anthropic-ai/claude-code", "install.cjs", of_claude, "x-claude-code-agent-id"),
    "codex": ("@openai/codex", "", of_codex, "thread-id"),
    "opencode": ("opencode-ai", "postinstall.mjs", of_opencode, "x-session-id"),
}


async def ran(
    command: list[str], where: Path, within_s: float, more: dict[str, str]
) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=where,
        env=os.environ | {"HOME": str(where)} | more,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(within_s):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode or 0, out.decode(errors="replace")


@pytest.mark.timeout(RUN_S + INSTALL_S + 60)
@pytest.mark.parametrize("client", CLIENTS)
async def test_an_npm_client_and_its_sub_agents_work_behind_the_router(tmp_path, client) -> None:
    package, unpack, settings, header = CLIENTS[client]
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm")
    (tmp_path / "package.json").write_text('{"private": true}')
    code, said = await ran([npm, "install", "--no-audit", package], tmp_path, INSTALL_S, {})
    if code:
        pytest.skip(f"npm cannot install {package}: {said[-200:]}")
    folder = tmp_path / "node_modules"
    if unpack:
        await ran(["node", unpack], folder / package, INSTALL_S, {"HOME": os.environ["HOME"]})
    model = ScriptedModel()
    async with (
        Programs(tmp_path) as programs,
        aiohttp.ClientSession() as http,
        AsyncExitStack() as served,
    ):
        arguments = ["serve", "--port", "0", "--admin-port", "0"]
        arguments += ["--names-aliases", f"{ALIAS}={MODEL}", "--names-aliases", f"claude-*={MODEL}"]
        for _ in range(2):
            url = await served.enter_async_context(served_by(model.answer, client_max_size=1 << 26))
            arguments += ["--worker", f"{url},kind=openai"]
        router = await programs.start("router", "router", arguments)

        async def ready() -> bool:
            async with http.get(f"{router.url}/health") as answer:
                return bool((await answer.json())["ready_workers"] == 2)

        await until(ready, "both workers to be ready")
        home = tmp_path / "home"
        home.mkdir()
        (program, *rest), more = settings(router.url, home)
        code, said = await ran([str(folder / ".bin" / program), *rest], home, RUN_S, more)
    assert code == 0, said
    assert DONE in said, said
    started = {headers.get(header) for _, headers, body in model.asked if CHILD in json.dumps(body)}
    assert len(started - {None}) >= 2, [headers for _, headers, _ in model.asked]
