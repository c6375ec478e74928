"""Tests that run each command of docs/gateway.md and of its sample files, with other ports and
hosts.

A command without a test, or a configuration key that does not exist, fails.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml

from router.cli.config import PICKER_PORT
from router.settings.schema import Config
from simulator import CHECKOUT
from tests.engines.envoy import BOOTSTRAPS, ENVOY, Envoy, picker_of, running_envoy, tls_to_picker
from tests.live.stack import MODEL, Stack, running

PAGE = (CHECKOUT / "docs" / "gateway.md").read_text(encoding="utf-8")
PROGRAMS = ("pip", "warmroute", "envoy", "curl", "openssl")
ENGINES = ("10.0.0.11:8000", "10.0.0.12:8000")


def commands(text: str) -> list[str]:
    """Return every command of a page, from its fenced and indented blocks."""
    lines = text.replace("\\\n", "").splitlines()
    found = [re.sub(r" +", " ", line.strip()) for line in lines]
    return [one for one in found if one.split(" ")[0] in PROGRAMS]


def of_samples() -> list[str]:
    """Return every command in the comments of the gateway's sample files."""
    texts = [one.read_text().replace("# ", "") for one in sorted(BOOTSTRAPS.glob("*.yaml"))]
    return [command for text in texts for command in commands(text)]


def shown(begin: str, text: str = PAGE) -> list[str]:
    """Return the words of the page's only command that begins with `begin`."""
    (found,) = (one for one in commands(text) if one.startswith(begin))
    return shlex.split(found)


@asynccontextmanager
async def served(folder: Path, words: Sequence[str], **more: Any) -> AsyncIterator[Stack]:
    """Run the page's `warmroute serve` command with two simulated workers on this machine."""
    assert words[:3] == ["warmroute", "serve", "--picker"]
    specs = [one.partition(",") for one in words if one.startswith("http://")]
    flags = [one for one in words[3:] if one != "--worker" and not one.startswith("http://")]
    assert [url.removeprefix("http://") for url, *_ in specs] == [*ENGINES][: len(specs)]
    async with running(folder, workers=len(specs), router=["--picker-port", "0"]) as stack:
        arguments = ["serve", "--picker-port", "0", "--port", "0", "--admin-port", "0", *flags]
        for worker, (_, comma, options) in zip(stack.workers, specs, strict=True):
            arguments += ["--worker", f"{worker.url}{comma}{options}"]
        program = await stack.programs.start("by-the-page", "router", arguments)
        found = Stack(stack.programs, program, stack.workers, stack.http)
        for worker_id in range(len(specs)):
            await found.until_state(worker_id, "ready")
        yield found


@asynccontextmanager
async def behind(
    folder: Path, stack: Stack, words: Sequence[str], **more: Any
) -> AsyncIterator[Envoy]:
    """Run the page's `envoy -c FILE` command in front of the router and its workers."""
    ENVOY.or_skip()
    assert words[:2] == ["envoy", "-c"]
    file = Path(words[2]).name
    assert words[2] in (file, f"docs/deploy/envoy/{file}")
    engines = [one.url.removeprefix("http://") for one in stack.workers]
    async with running_envoy(
        folder, file, [stack.router.facts["picker"]], engines, **more
    ) as envoy:
        yield envoy


async def answered(url: str, http: aiohttp.ClientSession) -> Any:
    """Send the page's request to `url` and return the answer's JSON."""
    words = shown("curl")
    assert words[1] == "http://127.0.0.1:8000/v1/completions"
    body, header = words[words.index("-d") + 1], words[words.index("-H") + 1]
    name, _, value = header.partition(": ")
    data = body.replace("MODEL", MODEL)
    sent = http.post(f"{url}/v1/completions", data=data, headers={name: value})
    async with sent as reply:
        assert reply.status == 200, await reply.text()
        assert reply.headers["x-warmroute-worker"].isdigit()
        return await reply.json()


async def test_the_curl_command_is_answered_through_envoy(tmp_path: Path) -> None:
    """The page's `curl` command gets an answer through Envoy and the picker."""
    async with (
        served(
            tmp_path, shown("warmroute serve --picker --worker http://10.0.0.11:8000 --worker")
        ) as stack,
        behind(tmp_path, stack, shown("envoy -c")) as envoy,
    ):
        words = [one.replace("MODEL", MODEL) for one in shown("curl")]
        words[1] = words[1].replace("http://127.0.0.1:8000", envoy.url)
        process = await asyncio.create_subprocess_exec(*words, "-s", stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert json.loads(out)["usage"]["completion_tokens"] == 8
        await answered(envoy.url, stack.http)
        await stack.assert_idle()


@pytest.mark.parametrize("file", ["original-dst.yaml", "override-host.yaml"])
async def test_commands_in_the_sample_files_give_an_answer(tmp_path: Path, file: str) -> None:
    text = (BOOTSTRAPS / file).read_text().replace("# ", "")
    words, envoys = shown("warmroute", text), shown("envoy", text)
    async with served(tmp_path, words) as stack, behind(tmp_path, stack, envoys) as envoy:
        await answered(envoy.url, stack.http)


async def test_envoy_accepts_the_documented_picker_certificate(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *shown("openssl"), cwd=tmp_path, stderr=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0
    words = shown("warmroute serve --picker --picker-tls-cert")
    words = [str(tmp_path / one) if one.startswith("picker.") else one for one in words]
    async with served(tmp_path, words) as stack:
        envoy = ["envoy", "-c", "original-dst.yaml"]
        async with behind(tmp_path, stack, envoy, change=tls_to_picker) as found:
            await answered(found.url, stack.http)


async def test_the_router_accepts_the_roles_on_the_page(tmp_path: Path) -> None:
    """The router accepts the page's roles; test_picker_split.py tests what they do."""
    words = shown("warmroute serve --picker --worker http://10.0.0.11:8000,role")
    async with served(tmp_path, words) as stack:
        assert [row["role"] for row in await stack.rows()] == ["prefill", "decode"]


async def test_the_documented_extra_exists() -> None:
    (extra,) = re.findall(r"\[(.*)\]", shown("pip install")[2])
    assert extra in (metadata("warmroute").get_all("Provides-Extra") or [])


RUN: Mapping[str, Callable[..., object]] = {
    "pip install '.[grpc]'": test_the_documented_extra_exists,
    "warmroute serve --picker --worker http://10.0.0.11:8000 ": (
        test_the_curl_command_is_answered_through_envoy
    ),
    "warmroute serve --picker --picker-endpoints 3 ": (
        test_commands_in_the_sample_files_give_an_answer
    ),
    "warmroute serve --picker --picker-tls-cert ": (
        test_envoy_accepts_the_documented_picker_certificate
    ),
    "warmroute serve --picker --worker http://10.0.0.11:8000,role": (
        test_the_router_accepts_the_roles_on_the_page
    ),
    "envoy -c docs/deploy/envoy/original-dst.yaml": test_the_curl_command_is_answered_through_envoy,
    "envoy -c o": test_commands_in_the_sample_files_give_an_answer,
    "curl http://127.0.0.1:8000": test_the_curl_command_is_answered_through_envoy,
    "openssl req": test_envoy_accepts_the_documented_picker_certificate,
}


def test_every_command_is_run_by_a_test() -> None:
    every = commands(PAGE) + of_samples()
    assert [one for one in every if not any(map(one.startswith, RUN))] == []
    assert [begin for begin in RUN if not any(one.startswith(begin) for one in every)] == []


def test_keys_and_modes_on_the_page_exist() -> None:
    keys = set(re.findall(r"`((?:picker|picker_tls|timeouts|limits)\.[a-z_]+)", PAGE))
    for key in keys:
        part, _, name = key.partition(".")
        fields = {one.name: one.type for one in msgspec.structs.fields(Config)}
        assert name in {one.name for one in msgspec.structs.fields(fields[part])}, key
    assert {"picker.port", "picker.decision_s", "picker.endpoints"} <= keys
    assert f"`--picker-port {PICKER_PORT}`" in PAGE
    assert f"{{port: {PICKER_PORT}}}" in PAGE
    for file in BOOTSTRAPS.glob("*.yaml"):
        filter_ = picker_of(yaml.safe_load(file.read_text()))
        assert filter_["processing_mode"]["request_body_mode"] == "BUFFERED"
        told = ", ".join(filter_["response_attributes"])
        assert f"`response_attributes: [{told}]`" in PAGE
