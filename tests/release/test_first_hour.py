"""Tests that run the commands of README, quickstart, operations and guides as written, on a host
with only the wheel.

Engines that need a GPU are replaced by simulated ones at the same addresses. Each test reads pages
to their end (tests/release/pages.py), so a new command is run, or is listed there as not run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.release.host import Host, commands, host
from tests.release.pages import (
    CLUSTER,
    NOT_RUN,
    SAMPLE,
    TIMED,
    Page,
    explained,
    pages,
    run_command,
    text_of,
    to_run,
    workers,
)
from tests.simulator.step_times.configs import CONFIGS, written
from tests.simulator.trace_lines import export, span

INSTALL_S = 600
ASK = to_run("docs/quickstart.md")[-1]
# The pages that each test reads.
READ = {
    "start": ["README.md", "docs/quickstart.md"],
    "peers": ["docs/coming-from.md"],
    "recipes": ["docs/recipes.md"],
    "pool": [
        "docs/operations.md",
        "docs/engines.md",
        "docs/reference/admin.md",
        "docs/reference/tokens.md",
        "docs/kubernetes.md",
    ],
    "keys": ["docs/reference/keys.md", "docs/reference/configuration.md", "docs/deployment.md"],
    "replicas": ["docs/replicas.md", "docs/reference/wire.md"],
    "split": ["docs/disaggregation.md"],
    "engine": ["docs/engine.md"],
    "agents": ["docs/agents.md"],
    "logs": ["docs/policies.md", "docs/reference/logs.md", "docs/demo.md"],
    "traffic": ["docs/your-traffic.md"],
    "simulator": ["docs/simulator.md", "docs/catalogue.md", "docs/reference/warmset.md"],
    "grpc": ["docs/triton.md", "docs/gateway.md"],
}

pytestmark = pytest.mark.timeout(INSTALL_S + 600)


@pytest.fixture(scope="module")
def installed(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, str], float]:
    """Install the wheel with README's line; return a user's environment variables and the seconds
    that it took.
    """
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "dist").mkdir()
    shutil.copy2(wheel, folder / "dist")
    line = to_run("README.md")[0]
    began_s = time.monotonic()
    online(folder, line if sys.version_info < (3, 12) else line.replace("cp311", "cp312"))
    environ = {"PATH": f"{folder}/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    return environ, time.monotonic() - began_s


def online(folder: Path, command: str, **environ: str) -> None:
    """Run a command that downloads packages, outside the host, whose own network has no
    internet.
    """
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **environ},
        timeout=INSTALL_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture
def clean_host(installed: tuple[dict[str, str], float], tmp_path: Path) -> Iterator[Host]:
    with host(tmp_path / "home", installed[0]) as made:
        yield made


def test_every_page_is_run_and_excluded_commands_exist() -> None:
    assert sorted(name for names in READ.values() for name in names) == sorted(pages())
    for name, lines in NOT_RUN.items():
        assert set(lines) <= set(commands(text_of(name))), name
    cluster = ("docs/kubernetes.md", "docs/deployment.md")
    others = {name for name in pages() if name not in cluster}
    assert not [
        one for name in others for one in commands(text_of(name)) if one.startswith(CLUSTER)
    ]


def test_the_readme_leads_to_a_routed_request_within_minutes(
    installed: tuple[dict[str, str], float], clean_host: Host
) -> None:
    began_s = time.monotonic()
    clean_host.start(f"{TIMED} --host 10.0.0.2 --port 8000")  # README starts one of two
    with Page("README.md", clean_host) as page:
        assert page.next().startswith("python3 -m venv")  # `installed` has run it
        assert explained(page.run_next(3))["worker"] in (0, 1)
    took_s = time.monotonic() - began_s
    print(f"first routed request {installed[1]:.0f} + {took_s:.0f} s after README's first line")


def test_the_commands_of_the_quick_start_work(clean_host: Host) -> None:
    """The commands of the quick start work, for vLLM, SGLang, and simulated workers."""
    with Page("docs/quickstart.md", clean_host) as page:
        assert page.next() == Page("README.md", clean_host).next()
        clean_host.start(f"{TIMED} --host 10.0.0.2 --port 8000")
        assert explained(page.run_next(3))["worker"] in (0, 1)
        clean_host.stop_all()
        page.run_next(2)
        assert [row["state"] for row in workers(clean_host)] == ["ready"]
        clean_host.stop_all()
        page.run_next(3)
        ask = page.next()
        first, second = (explained(run_command(clean_host, ask)) for _ in range(2))
        assert first["worker"] == second["worker"]
        assert (first["expected_hit_tokens"], second["expected_hit_tokens"] > 0) == (0, True)


def pool(on: Host, count: int = 3) -> None:
    """Start `count` simulated workers at ports from 8001 on, and a router with the first two."""
    for n in range(count):
        on.start(f"{TIMED} --port {8001 + n}")
    run_command(on, to_run("docs/quickstart.md")[-2])


def ensure_worker(on: Host, url: str) -> int:
    """Return the id of the worker at a URL; add the worker if it is not there."""
    for row in workers(on):
        if row["url"] == url:
            return int(row["id"])
    add = f"""curl -H 'Content-Type: application/json' -d '"{url}"'"""
    return int(json.loads(on.run(f"{add} http://127.0.0.1:8081/workers"))["id"])


def ensure_removed(on: Host, url: str) -> None:
    """Remove the worker at a URL, if there is one."""
    number = ensure_worker(on, url)
    on.run(f"curl -X DELETE 'http://127.0.0.1:8081/workers/{number}?force=true'")


def test_command_lines_of_other_routers_are_converted(clean_host: Host) -> None:
    """The command lines of other routers can be converted; the test checks and serves the last
    file.
    """
    with Page("docs/coming-from.md", clean_host) as page:
        page.run_next(5)
        run_command(clean_host, page.next())
    clean_host.stop_all()


def test_each_recipe_serves_requests(clean_host: Host) -> None:
    """Each recipe's lines serve requests, with two of our engines in place of the recipe's."""
    for n in (1, 2):
        clean_host.start(f"{TIMED} --host 10.0.0.{n} --port 8000")
    with Page("docs/recipes.md", clean_host) as page:
        while page.left:
            page.run_next()
            clean_host.stop()
    clean_host.stop_all()


def test_the_commands_for_operators_work(clean_host: Host) -> None:
    """The commands of the operators' page work; in them N is a worker that comes and goes, and
    HOST:PORT its address.
    """
    pool(clean_host)
    run_command(clean_host, ASK)
    operations, engines, admin, tokens, kubernetes = READ["pool"]
    other = "http://127.0.0.1:8003"
    with Page(operations, clean_host) as page:
        assert len(page.left) > 15
        while page.left:
            line = page.next(
                (r"HOST:8080", "127.0.0.1:8080"),
                (r"(http://)(HOST:PORT|WORKER\b|ENGINE\b)", other),
            )
            if "-d " in line and line.endswith("/workers"):
                ensure_removed(clean_host, other)
            elif "/workers/N" in line:
                line = line.replace("/workers/N", f"/workers/{ensure_worker(clean_host, other)}")
            run_command(clean_host, line)
    with Page(engines, clean_host) as page:
        page.run_next()
        page.run_next(1, (r"$", " --requests 20"))
        ensure_worker(clean_host, other)
        page.run_next(2, (r"http://10.0.0.11:8000", other))
        clean_host.until(
            f"curl http://127.0.0.1:8081/workers | grep -q {other} || echo gone", "gone"
        )
        page.run_next(1, (r"/workers/3", f"/workers/{ensure_worker(clean_host, other)}"))
    with Page(admin, clean_host) as page:
        clean_host.until(
            f"curl http://127.0.0.1:8081/workers | grep -q {other} || echo gone", "gone"
        )
        number = json.loads(page.run_next())["id"]
        while page.left:
            page.run_next(1, (r"/workers/2\b", f"/workers/{number}"))
    with Page(tokens, clean_host) as page:
        said = page.run_next(
            1, (r"\bM\b", '"warmroute-timed"'), ("WORKER", "http://127.0.0.1:8001")
        )
        assert json.loads(said)["count"] > 0
    with Page(kubernetes, clean_host) as page:
        while page.left:
            page.run_next(1, (r"^warmroute top$", "warmroute top --once"))


def test_the_commands_with_api_keys_and_a_configuration_file_work(clean_host: Host) -> None:
    """The commands with API keys and a file of settings work: a client and an operator each have a
    key, and the router reads all settings from the file.
    """
    keys, configuration, deployment = READ["keys"]
    clean_host.start(f"{TIMED} --port 8001")
    with Page(keys, clean_host) as page:
        new = page.next((r" NAME --tenant TENANT >> FILE", " alice --tenant team-a"))
        for who in ("client", "admin"):
            clean_host.run(
                f"{new} >> {who}-keys 2> {who}-said && grep -o 'wr-.*' {who}-said > {who}"
            )
        hashed = clean_host.run(f"{page.next()} < client").strip()
        assert clean_host.run("cat client-keys").startswith(f"{hashed} team-a name=alice")
    (clean_host.folder / "router.yaml").write_text(
        "workers: [http://127.0.0.1:8001]\n"
        "api_keys_file: client-keys\n"
        "admin_keys_file: admin-keys\n"
    )
    with Page(configuration, clean_host) as page:
        page.run_next()
    with Page(deployment, clean_host) as page:
        while page.left:
            page.run_next(1, (r"/etc/warmroute/", ""))
    top = "warmroute top --once --admin-key-file admin"
    clean_host.until(top, "ready")
    assert "401" in clean_host.run(f"! {ASK} 2>&1")
    key = clean_host.run("cat client").strip()
    asked = ASK.replace("curl -i", f"curl -i -H 'Authorization: Bearer {key}'")
    assert explained(run_command(clean_host, asked))["worker"] == 0


def test_the_commands_for_two_replicas_work(clean_host: Host) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian package: redis-server)")
    replicas, wire = READ["replicas"]
    for n in range(2):
        clean_host.start(f"{TIMED} --port {8001 + n}")
    urls = ", ".join(f"http://127.0.0.1:{8001 + n}" for n in range(2))
    (clean_host.folder / "router.yaml").write_text(f"workers: [{urls}]\n")
    with Page(replicas, clean_host) as page:
        clean_host.run(page.next().removesuffix("&").strip() + " --daemonize yes")
        clean_host.environ["WARMROUTE_STATE"] = page.next().partition("WARMROUTE_STATE=")[2]
        page.run_next(2)
        for port in (8081, 8091):
            clean_host.until(
                f"curl http://127.0.0.1:{port}/metrics", "\nwarmroute_replicas_peers 1.0"
            )
        clean_host.stop(2)
        for name in ("a", "b"):
            page.run_next(1, (r"$", f" --replicas-name {name}"))
        for port in (8081, 8082):
            clean_host.until(
                f"curl http://127.0.0.1:{port}/metrics", "\nwarmroute_replicas_peers 1.0"
            )
    clean_host.environ["REDIS"] = clean_host.environ["WARMROUTE_STATE"]
    with Page(wire, clean_host) as page:
        page.run_next(2)
    clean_host.stop_all()
    clean_host.run("redis-cli shutdown nosave || true")


def test_the_commands_for_disaggregated_prefill_work(clean_host: Host) -> None:
    """Each kind of prefill and decode pair on the page works; where our engines replace others, KV
    moves by our own transfer.
    """
    with Page("docs/disaggregation.md", clean_host) as page:
        for roles in (["decode", "prefill"], ["decode", "prefill"], ["both", "both"]):
            page.run_next(3)
            assert sorted(row["role"] for row in workers(clean_host)) == roles
            run_command(clean_host, ASK)
            clean_host.stop_all()
        clean_host.start(f"{TIMED} --host 10.0.0.2 --port 8000")
        page.run_next(2, (r",transfer=\w+", ""))
        page.run_next(1, (r"$", " --requests 40"))


def test_the_commands_for_the_warmroute_engine_work(clean_host: Host) -> None:
    """The page's commands for our engine work with a simulated worker; its other commands need
    torch.
    """
    (engine,) = READ["engine"]
    with Page(engine, clean_host) as page:
        assert json.loads(page.run_next(2))["usage"]["completion_tokens"] == 5


def test_the_commands_for_agents_work(clean_host: Host) -> None:
    """The commands for agents work: the test runs the router with and without names that Claude
    Code shows, and the page's checks.
    """
    with Page("docs/agents.md", clean_host) as page:
        for _ in range(2):
            for number in (1, 2):
                clean_host.start(f"{TIMED} --host 10.0.0.{number} --port 8000 --model-name llama")
            page.run_next()
            if "doctor" not in page.left[0]:
                clean_host.stop_all()
        page.run_next(3, ("ROUTER", "127.0.0.1"))


def test_the_commands_for_policies_and_logs_work(clean_host: Host) -> None:
    policies, logs, demo = READ["logs"]
    for n in (1, 2):
        clean_host.start(f"{TIMED} --host 10.0.0.{n} --port 8000")
    (source,) = re.findall(r"```python\n# my_policies.py\n(.*?)```", text_of(policies), re.DOTALL)
    (clean_host.folder / "my_policies.py").write_text(source)
    with Page(policies, clean_host) as page:
        page.run_next(1, (r"127.0.0.1:8000", "10.0.0.1:8000"))
        assert "my_policies:newest" in explained(run_command(clean_host, ASK))["policy"]
    clean_host.stop()
    parts = ((r"/var/lib/warmroute/", ""), (r"requests-\d+T", "requests-*T"))
    with Page(logs, clean_host) as page:
        page.run_next(1, *parts)
        with Page(demo, clean_host) as other:
            other.run_next(1, (r"conversation.jsonl.gz", SAMPLE), (r"$", " --requests 12"))
        page.run_next(2, *parts)
        clean_host.stop()
        assert "opentelemetry" in page.refused()


def test_the_commands_for_the_simulator_work(clean_host: Host) -> None:
    """The simulator's commands work: they replay a short log, and some requests of the installed
    sample.
    """
    simulator, *others = READ["simulator"]
    for n in (1, 2):
        clean_host.start(f"{TIMED} --host 10.0.0.{n} --port 8000")
    for name, text in re.findall(
        r"<!-- file: (\S+) -->\n```yaml\n(.*?)```", text_of(simulator), re.DOTALL
    ):
        (clean_host.folder / name).write_text(text)
    model = clean_host.folder / "Qwen3-32B"
    model.mkdir()
    written(model, CONFIGS["qwen3-32b"])
    cut = (
        (rf"({SAMPLE}|'gen:(?:agentic|coding_agents).*?')", r"\1 --requests 24"),
        (r"--spread 3 --rate \d", ""),
        (r"--resamples 10", "--resamples 2"),
        (r"(sim plan .*)", r"\1 --policy hybrid --seed 1"),
    )
    with Page(simulator, clean_host) as page:
        page.run_next(1, (r"$", " --record-facts facts.bin"))
        run_command(clean_host, ASK)
        clean_host.stop_all()
        page.run_next(1, (r"--seconds 60", "--seconds 5"))
        while page.left:
            if re.search(r"warmroute-sim (calibrate|validate)", page.left[0]):
                assert "scipy" in page.refused()
            else:
                page.run_next(1, *cut)
    for name in others:
        with Page(name, clean_host) as page:
            page.run_next(1, *cut, (r"('gen:sglang.*?')", r"\1 --requests 24"))


def test_the_commands_for_traces_work(clean_host: Host) -> None:
    """The commands for traces replay each kind of file; the test makes spans and agents' traces
    itself.
    """
    for n in (1, 2):
        clean_host.start(f"{TIMED} --host 10.0.0.{n} --port 8000")
    said = [{"role": "user", "content": "Good day. " * 60}]
    spans = [span(at, input__messages=said, usage__output_tokens=5) for at in (1, 2)]
    (clean_host.folder / "spans.jsonl").write_text(json.dumps(export(*spans)))
    calls = [{"type": "n", "t": t, "in": 128, "out": 9, "hash_ids": [1, 2]} for t in (0, 9)]
    agents = {"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": calls}
    (clean_host.folder / "agents.jsonl").write_text(json.dumps(agents))
    text = text_of("docs/your-traffic.md")
    with Page("docs/your-traffic.md", clean_host) as page:
        page.run_next()
        replayed = page.run_next()
        for row in re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+%) \|$", text, re.M):
            assert re.search(r"^{}\b.* {}\*? .* {}\*? .* {}".format(*row), replayed, re.M), row
        (assumed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
        assert assumed in replayed
        assert re.search(
            r"^Take .* worker", page.run_next(1, (r"$", " --seed 1 --requests 120")), re.M
        )
        page.run_next()
        for _ in range(3):
            run_command(clean_host, ASK)
        clean_host.stop_all()
        for notes in ("(requests)", "an access log has no prefixes", "(otel)", "(weka)"):
            assert notes in page.run_next()


def test_the_commands_for_triton_and_a_data_plane_work(clean_host: Host) -> None:
    """The commands for Triton and for a data plane work; the gRPC ports are opened after the page's
    line that installs gRPC.
    """
    triton, gateway = READ["grpc"]
    for n in (1, 2):
        clean_host.start(f"{TIMED} --host 10.0.0.{n} --port 8000")
    with Page(triton, clean_host) as page:
        line = page.left[0]
        online(clean_host.folder, page.refused(), PATH=clean_host.environ["PATH"])
        run_command(clean_host, line)
        model = (r"models/ensemble/", "models/warmroute-timed/")
        page.run_next(2, model)
        assert "routed_by" in page.run_next(1, model)
        page.run_next(1, (r"request=13", "last=1"))
        page.run_next(1, (r"$", " --seconds 1"))
        page.run_next(2)
    clean_host.stop(2)
    with Page(gateway, clean_host) as page:
        here = ((r"10.0.0.11", "10.0.0.1"), (r"10.0.0.12", "10.0.0.2"))
        page.run_next(1, *here)
        clean_host.stop()
        page.run_next(2, *here)
        clean_host.stop()
        page.run_next(1, *here)
