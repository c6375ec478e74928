"""A first hour: the commands of README, quickstart, operations and guides, as they stand,
on a host that has the wheel and nothing else of ours.

Engines that need a GPU are replaced by timed ones at the same addresses.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from release.wheels import ROOT
from tests.release.host import Host, commands, host, replaced

INSTALL_S = 600
README = (ROOT / "README.md").read_text(encoding="utf-8")
TIMED = "warmroute-engine --timed llama-3.1-8b-h100"
# Names that a reader of the pages fills in, and engines and tokenizers that this host lacks.
FILLED = (
    (r" --tokenizer /models/MODEL", ""),
    (r"^(VLLM_\S+ )*vllm serve .*--port (\d+).*", rf"{TIMED} --host 10.0.0.1 --port \2"),
    (r"^python -m sglang\S* .*--port (\d+).*", rf"{TIMED} --host 10.0.0.1 --port \1"),
    (r'"(MODEL|tiny)"', '"warmroute-timed"'),
    (r"\.venv/bin/", ""),
)
SERVERS = ("warmroute serve", "warmroute-engine")

pytestmark = pytest.mark.timeout(INSTALL_S + 600)


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """The part of a page under one of its titles."""
    return re.split(r"(?m)^## ", text.split(f"\n## {title}\n")[1])[0]


@pytest.fixture(scope="module")
def installed(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, str], float]:
    """A user's environment after README's line for a wheel, and how many seconds that took."""
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "dist").mkdir()
    shutil.copy2(wheel, folder / "dist")
    (line,) = re.findall(r"(?m)^(python3 -m venv .*dist/warmroute-\*\.whl)", README)
    began_s = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=os.environ,
        timeout=INSTALL_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    environ = {"PATH": f"{folder}/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    return environ, time.monotonic() - began_s


@pytest.fixture
def stranger(installed: tuple[dict[str, str], float], tmp_path: Path) -> Iterator[Host]:
    with host(tmp_path / "home", installed[0]) as made:
        yield made


def does(on: Host, command: str) -> str:
    """Do what a page says: start a program, or run a command to its end."""
    line = replaced(command, FILLED).removesuffix("&").strip()
    if not line.startswith(SERVERS):
        return on.run(line)
    on.start(line)
    if line.startswith("warmroute serve") and " --config " not in line:
        admin = re.search(r"--admin-port (\d+)", line)
        port = admin[1] if admin else "8081"
        count = line.count("--worker ")
        on.until(f"curl http://127.0.0.1:{port}/health", f'"ready_workers":{count},')
    return ""


def workers(on: Host) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(on.run("curl http://127.0.0.1:8081/workers"))["workers"]
    return rows


def explained(answer: str) -> dict[str, Any]:
    """The decision that an answer's header tells of."""
    (text,) = re.findall(r"(?im)^x-warmroute-explain: (.*?)\r?$", answer)
    decision: dict[str, Any] = json.loads(text)
    return decision


def test_the_readme_has_a_request_routed_within_minutes(
    installed: tuple[dict[str, str], float], stranger: Host
) -> None:
    began_s = time.monotonic()
    stranger.start(f"{TIMED} --host 10.0.0.2 --port 8000")  # README starts one of two
    for command in commands(section(README, "vLLM in five minutes")):
        if not re.match(r"git clone|python3 -m venv", command):
            does(stranger, command)
    ask = commands(section(page("quickstart.md"), "vLLM"))[-1]
    assert ask.startswith("curl ")
    assert explained(does(stranger, ask))["worker"] in (0, 1)
    took_s = time.monotonic() - began_s
    print(f"first routed request {installed[1]:.0f} + {took_s:.0f} s after README's first line")


def test_the_quick_start_without_a_gpu(stranger: Host) -> None:
    *starts, ask = commands(section(page("quickstart.md"), "Without a GPU"))
    for command in starts:
        does(stranger, command)
    first, second = (explained(does(stranger, ask)) for _ in range(2))
    assert first["worker"] == second["worker"]
    assert (first["expected_hit_tokens"], second["expected_hit_tokens"] > 0) == (0, True)


def test_the_quick_start_with_sglang(stranger: Host) -> None:
    for command in commands(section(page("quickstart.md"), "SGLang")):
        does(stranger, command)
    assert [row["state"] for row in workers(stranger)] == ["ready"]


def pool(on: Host, count: int = 3) -> None:
    """Timed workers on ports from 8001 on; a router before the first two."""
    for n in range(count):
        on.start(f"{TIMED} --port {8001 + n}")
    does(on, commands(section(page("quickstart.md"), "Without a GPU"))[-2])


def test_the_commands_of_an_operator(stranger: Host) -> None:
    """Each `curl` of the page, N the newest worker, HOST:PORT one that comes and goes."""
    pool(stranger)
    other = "127.0.0.1:8003"
    filled = (
        (r"'?http://HOST:PORT/health'?", f"http://{other}/health"),
        (r"HOST:PORT", other),
        (r"http://HOST:8080", "http://127.0.0.1:8080"),
        (r"http://(WORKER|ENGINE)/", f"http://{other}/"),
    )
    asked = commands(page("operations.md"), inline=True)
    assert len(asked) > 15
    for command in asked:
        line = replaced(command, filled)
        there = {row["url"]: row["id"] for row in workers(stranger)}
        adds = "-d " in line and line.endswith("/workers")
        if adds and f"http://{other}" in there:
            number = there[f"http://{other}"]
            stranger.run(f"curl -X DELETE 'http://127.0.0.1:8081/workers/{number}?force=true'")
        elif "/workers/N" in line and f"http://{other}" not in there:
            add = f"""curl -H 'Content-Type: application/json' -d '"http://{other}"'"""
            number = json.loads(stranger.run(f"{add} http://127.0.0.1:8081/workers"))["id"]
        else:
            number = there.get(f"http://{other}", 0)
        does(stranger, line.replace("/workers/N", f"/workers/{number}"))


def test_the_reference_of_the_admin_port(stranger: Host) -> None:
    pool(stranger)
    text = page("reference/admin.md")
    for command in commands(section(text, "Workers")):
        does(stranger, command)
    does(stranger, commands(section(page("quickstart.md"), "Without a GPU"))[-1])
    for command in commands(section(text, "Why did a request go there?")):
        does(stranger, command)


def test_two_routers_that_share(stranger: Host) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian package: redis-server)")
    for n in range(2):
        stranger.start(f"{TIMED} --port {8001 + n}")
    redis, export, *routers = commands(page("replicas.md").split("**To try it**")[1])[:4]
    stranger.run(redis.removesuffix("&").strip() + " --daemonize yes")
    stranger.environ["WARMROUTE_STATE"] = export.partition("WARMROUTE_STATE=")[2]
    for command in routers:
        does(stranger, command)
    for port in (8081, 8091):
        stranger.until(f"curl http://127.0.0.1:{port}/metrics", "\nwarmroute_replicas_peers 1.0")
    stranger.stop_all()
    stranger.run("redis-cli shutdown nosave || true")


def test_prefill_and_decode_apart(stranger: Host) -> None:
    *engines, router = commands(section(page("disaggregation.md"), "Two of our engines"))[:3]
    for command in engines:
        stranger.start(command.replace("serve DIR", "--timed llama-3.1-8b-h100"))
    does(stranger, router)
    assert sorted(row["role"] for row in workers(stranger)) == ["decode", "prefill"]
    does(stranger, commands(section(page("quickstart.md"), "Without a GPU"))[-1])
