"""Helpers of the monitoring tests: they parse metrics, send traffic, and run a real Prometheus."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.model_dirs import write_model
from tests.live.stack import MODEL, Stack, misbehaving, until

ROOT = Path(__file__).parents[2]
RULES = ROOT / "grafana" / "prometheus"
SCRAPE = "250ms"
LISTENING = re.compile(r'msg="Listening on" address=(\S+)')
BROKEN = b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops"


async def exposition(stack: Stack) -> str:
    """Return the router's current `/metrics` page."""
    async with stack.http.get(f"{stack.admin}/metrics") as reply:
        assert reply.status == 200
        return await reply.text()


def samples(text: str) -> dict[str, set[str]]:
    """Return label names by sample name, without the creation times that the client
    library adds.
    """
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def tokenizing(folder: Path) -> list[str]:
    """Return flags of a router with a tokenizer and a name for its model.

    Workers without a tokenizer count tokens differently.
    """
    return ["--tokenizer", str(write_model(folder)), "--names-aliases", f"named={MODEL}"]


@asynccontextmanager
async def traffic_of_every_kind(stack: Stack) -> AsyncIterator[None]:
    """Send traffic of every kind through the router during the block, so that each metric has
    samples.

    The router must have the flags of `tokenizing`.
    """

    async def checked() -> bool:
        return "warmroute_tokenizer_exact{" in await exposition(stack)

    async with misbehaving(BROKEN, "broken") as (url, _):
        broken = await stack.add(url)
        await _one_of_each(stack, 0)
        await until(checked, "the tokens' check")
        traffic = asyncio.create_task(_traffic(stack))
        try:
            yield
        finally:
            traffic.cancel()
            with suppress(asyncio.CancelledError):
                await traffic
            await stack.remove(broken)


async def _traffic(stack: Stack) -> None:
    for number in itertools.count(1):
        await _one_of_each(stack, number)
        await asyncio.sleep(0.05)  # a little load, not as much as this machine can take


async def _one_of_each(stack: Stack, number: int) -> None:
    prompt = [*range(640), number]
    await asyncio.gather(
        _answered(stack, {"model": MODEL, "prompt": prompt, "max_tokens": 2}),
        _answered(stack, {"model": MODEL, "prompt": prompt, "max_tokens": 9, "stream": True}),
        _answered(stack, {"model": "named", "prompt": [1], "max_tokens": 2, "stream": True}),
        _answered(stack, {"model": MODEL, "prompt": []}),  # the client's fault
        _answered(stack, {"model": "unheard of", "prompt": [1]}),  # refused by the decision core
        _answered(stack, {"model": "broken", "prompt": [1]}),  # the worker's fault
    )


async def _answered(stack: Stack, body: dict[str, Any]) -> None:
    async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
        await reply.read()


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A real Prometheus that scrapes the tests' targets. Lifetime: test."""

    http: aiohttp.ClientSession
    url: str
    target: str  # the `instance` label of the router

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of an instant query. Fails with Prometheus' own message if it does not
        parse.
        """
        async with self.http.get(f"{self.url}/api/v1/query", params={"query": expr}) as reply:
            answer = await reply.json()
        assert answer["status"] == "success", f"{expr}: {answer.get('error')}"
        rows: list[dict[str, Any]] = answer["data"]["result"]
        return rows

    async def rules(self, kind: str) -> list[dict[str, Any]]:
        """Return all rules of a kind, `alert` or `record`, as last evaluated."""
        async with self.http.get(f"{self.url}/api/v1/rules", params={"type": kind}) as reply:
            groups = (await reply.json())["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    async def firing(self) -> dict[str, list[dict[str, str]]]:
        """Return the labels of each firing alert, by its name."""
        async with self.http.get(f"{self.url}/api/v1/alerts") as reply:
            alerts = (await reply.json())["data"]["alerts"]
        found: dict[str, list[dict[str, str]]] = {}
        for alert in alerts:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return found

    async def until_data(self, exprs: Iterable[str]) -> None:
        """Poll until every query has had data; a failure names the queries that never had any."""
        left = list(exprs)

        async def all_have_data() -> bool:
            left[:] = [expr for expr in left if not await self.query(expr)]
            return not left

        try:
            await until(all_have_data, "data")
        except AssertionError as late:
            raise AssertionError("no data from:\n" + "\n".join(left)) from late


def accelerated(text: str) -> str:
    """Return the Prometheus rules with minutes as seconds and hours as minutes, because the tests'
    faults are short.
    """
    seconds = {"s": 1 / 60, "m": 1, "h": 60}

    def shorter(found: re.Match[str]) -> str:
        return f"{found[1]}{max(1, round(int(found[2]) * seconds[found[3]]))}s"

    return re.sub(r"(\[|offset |for: )(\d+)([smh])\b", shorter, text)


def _config(folder: Path, jobs: Mapping[str, Sequence[str]], every: str) -> Path:
    """Write the shipped scrape configuration with shorter intervals, its rules and the tests'
    targets.
    """
    config = yaml.safe_load((RULES / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {
        "scrape_interval": every,
        "scrape_timeout": every,
        "evaluation_interval": every,
    }
    for rules in config["rule_files"]:
        text = (RULES / rules).read_text(encoding="utf-8")
        (folder / rules).write_text(accelerated(text), encoding="utf-8")
    for job in config["scrape_configs"]:
        (files,) = job["file_sd_configs"]
        targets = folder / files["files"][0]
        targets.parent.mkdir(exist_ok=True)
        hosts = [url.removeprefix("http://") for url in jobs.get(job["job_name"], ())]
        targets.write_text(json.dumps([{"targets": hosts}]), encoding="utf-8")
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@asynccontextmanager
async def prometheus(
    http: aiohttp.ClientSession,
    folder: Path,
    targets: Mapping[str, Sequence[str]],
    every: str = SCRAPE,
) -> AsyncIterator[Prometheus]:
    """Run Prometheus at a free port with the shipped jobs, and with their rules at the speed of
    `accelerated`.

    `targets` has each job's URLs. Skips the test if Prometheus is not installed.
    """
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian package: prometheus)")
    config, log = _config(folder, targets, every), folder / "prometheus.log"
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
            stdout=subprocess.DEVNULL,
            stderr=sink,
        )
    try:

        async def ready() -> bool:
            assert process.returncode is None, log.read_text()
            found = LISTENING.search(log.read_text())
            if found is None:
                return False
            async with http.get(f"http://{found[1]}/-/ready") as reply:
                return reply.status == 200

        await until(ready, "prometheus to be ready")
        found = LISTENING.search(log.read_text())
        assert found is not None
        (router,) = targets["warmroute"]
        yield Prometheus(http, f"http://{found[1]}", router.removeprefix("http://"))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def promtool() -> str:
    """Return the path of promtool. Skips the test if it is not installed."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian package: prometheus)")
    return found


def run(command: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a short command with `given` as its input."""
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
