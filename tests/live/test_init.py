"""Tests of `warmroute init` against real engines, ports with other servers, and closed ports."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from router.cli.find_engines import configuration, find_engines, free_ports
from router.engines.spec import WorkerSpec
from simulator.live.processes import Programs
from tests.live.commands import output_of
from tests.live.light_engine import LightEngine
from tests.live.ports import lasting_port
from tests.live.stack import MODEL, engine_arguments
from tests.served_app import served_by


async def used(path: Path) -> Any:
    status, said = await output_of("config", "--check", str(path))
    assert (status, said[:4]) == (0, "ok: "), said
    return read(path)


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


async def test_init_recognizes_engines_and_writes_them_to_the_file(tmp_path: Path) -> None:
    out = tmp_path / "router.yaml"
    async with Programs(tmp_path) as programs:
        engine = await programs.start("engine", "engine", engine_arguments())
        pasted = engine.url.removeprefix("http://") + "/v1"
        gone = f"http://127.0.0.1:{lasting_port()}"
        workers = ("--worker", pasted, "--worker", engine.url, "--worker", f"{gone},weight=2")
        status, said = await output_of("init", *workers, "--out", str(out))
        assert status == 0, said
        assert f"found {engine.url}: kind warmroute, models {MODEL}, block size 16" in said
        assert f"found {gone}: not recognized: " in said
        assert f"wrote {out}; next: warmroute serve --config {out}" in said
        assert (await used(out))["workers"] == [engine.url, f"{gone},weight=2"]
        before = out.read_text()
        status, said = await output_of("init", "--out", str(out))
        assert (status, "exists: give --force" in said) == (2, True)
        assert out.read_text() == before
        status, said = await output_of("init", *workers[:2], "--out", str(out), "--force")
        assert (await used(out))["workers"] == [engine.url]
        assert len(out.read_text().splitlines()) <= 16
        status, said = await output_of("init", *workers[:2], "--out", "-")
        assert (status, "\nport: " in said) == (0, True)


async def test_init_finds_engines_on_local_ports(tmp_path: Path) -> None:
    engine, closed = LightEngine(model='m"\n# x: \u2028'), lasting_port()
    await engine.start()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-nobody\r\n")
        writer.close()

    other = await asyncio.start_server(mute, "127.0.0.1", 0)
    try:
        ports = (closed, other.sockets[0].getsockname()[1], engine.port)
        found = await find_engines([], ports)
    finally:
        other.close()
        await engine.stop()
    assert [(one.spec.url, one.recognized.kind) for one in found if one.recognized] == [
        (engine.url, "openai")
    ]
    out = tmp_path / "router.yaml"
    out.write_text(configuration(found, *free_ports(20_000)), encoding="utf-8")
    assert (await used(out))["workers"] == [engine.url]


async def test_for_triton_the_file_has_a_grpc_port_and_no_tokenizer() -> None:
    pages: dict[str, Any] = {
        "/v2": {"name": "triton", "extensions": ["statistics"]},
        "POST /v2/repository/index": [{"name": "bot", "state": "READY"}],
    }

    async def answer(request: web.Request) -> web.Response:
        key = request.path if request.method == "GET" else f"{request.method} {request.path}"
        page = pages.get(key)
        return web.Response(status=404) if page is None else web.json_response(page)

    async with served_by(answer) as url:
        found = await find_engines([WorkerSpec(url)], ())
    text = configuration(found, 1234, 1235, 1236)
    assert "\n# grpc_port: 1236\n" in text
    assert "tokenizer" not in text
    assert yaml.safe_load(text)["workers"] == [url]


async def test_without_an_engine_the_file_has_an_example_worker(tmp_path: Path) -> None:
    assert await find_engines([], [lasting_port()]) == []
    out = tmp_path / "router.yaml"
    out.write_text(configuration([], 1234, 1235, 1236), encoding="utf-8")
    assert (await used(out))["workers"] == ["http://127.0.0.1:8000"]
    assert "an example" in out.read_text()


@pytest.mark.parametrize("folder", ["has one", "has none", "relative"])
async def test_the_file_names_a_local_folder_with_a_tokenizer(tmp_path: Path, folder: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    if folder != "has none":
        (model / "tokenizer.json").write_text("{}")
    engine = LightEngine(root="model" if folder == "relative" else str(model))
    await engine.start()
    try:
        found = await find_engines([WorkerSpec(engine.url)], ())
    finally:
        await engine.stop()
    text = configuration(found, 1234, 1235, 1236)
    assert yaml.safe_load(text).get("tokenizer") == (str(model) if folder == "has one" else None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--worker", "gpu1"], "as in http://gpu1:8000"),
        (["--worker", "http://h:1,kin=vllm"], "did you mean kind?"),
        (["--out", "FOLDER"], "is a folder; name a file in it"),
        (["--out", "FOLDER/nowhere/x.yaml"], "is not a folder; create it first"),
        (["--otu", "x"], "did you mean --out?"),
    ],
)
async def test_bad_input_gives_a_one_line_error(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    given = [text.replace("FOLDER", str(tmp_path)) for text in arguments]
    status, said = await output_of("init", *given)
    assert status == 2
    assert says in said
    assert len(said.splitlines()) == 1


def test_free_ports_are_chosen_in_ascending_order() -> None:
    first, second, third = free_ports(20_000)
    assert 20_000 <= first < second < third
