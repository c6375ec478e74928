"""Tests of the operators' pages: their tables, log lines and commands are right and work as
written.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
from pathlib import Path
from typing import get_args

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from grafana.panels_fleet import STATES
from grafana.panels_kv import FLOW, LOST, SYNC
from grafana.panels_slo import POLICY_FAULTS, REJECTIONS
from router.http.errors import WorkerErrorKind
from tests.frozen import freeze
from tests.grafana.monitoring import exposition, tokenizing, traffic_of_every_kind
from tests.live.stack import MODEL, engine_arguments, running, until
from tests.told_decision import decision_in

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = ("admin", "failures", "keys", "logs", "metrics", "server", "errors", "apis", "warmset")
PAGES = ["operations.md", "deployment.md", *(f"reference/{name}.md" for name in REFERENCE)]
PAGE = "\n".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
METRIC_ROW = re.compile(r"^\| `(warmroute_\w+)` \|([^|]*)\|", re.MULTILINE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    nobody = tmp_path_factory.mktemp("source") / "workers.txt"
    nobody.write_text("# none\n")
    router = [*tokenizing(tmp_path_factory.mktemp("model")), "--discover", f"file:{nobody}"]
    async with running(tmp_path_factory.mktemp("logs"), workers=2, router=router) as stack:
        yield stack


def blocks(language: str) -> list[str]:
    """Return the pages' fenced blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def rows(title: str) -> list[list[str]]:
    """Return the cells of a section's tables, row by row."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


async def test_the_table_of_metrics_equals_the_routers_metrics(stack) -> None:
    async with traffic_of_every_kind(stack):
        text = await exposition(stack)
    shown: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.endswith("_created"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels}
            shown[name] = labels - {"le"}
    told = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in METRIC_ROW.findall(PAGE)}
    # Those of routers that share state are held to the page where some do (test_replica_routers);
    # faults of KV transfers have series where workers exchange KV (test_split_requests), those of
    # roles where a half is missing or roles follow the work (test_roles_live).
    shown["warmroute_worker_kv_transfer_faults_total"] |= {"worker", "fault"}
    shown["warmroute_pool_half_missing"] |= {"model", "group", "missing"}
    shown["warmroute_role_work"] = {"group", "role"}
    told = {name: labels for name, labels in told.items() if "_replicas_" not in name}
    assert told == shown
    assert set(re.findall(r'\bkind="(\w+)"', text)) == {*SYNC, *LOST, *FLOW, *POLICY_FAULTS}


@pytest.mark.parametrize(
    "values", [REJECTIONS, STATES, SYNC, LOST, FLOW, POLICY_FAULTS, get_args(WorkerErrorKind)]
)
async def test_every_code_state_and_kind_is_explained(values) -> None:
    assert [value for value in values if f"`{value}`" not in PAGE] == []


async def test_quoted_log_lines_exist() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "router").rglob("*.py"))
    quoted = re.findall(r"`([^`]+)`", " ".join(row[2] for row in rows("When something fails")))
    assert len(quoted) > 8
    for line in (*quoted, "not changed while running:"):
        pieces = [piece.strip() for piece in re.split(r"\bN\b|\bURL\b", line)]
        assert all(piece in source for piece in pieces), line


async def test_quoted_keys_exist() -> None:
    known = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:limits|timeouts|intervals|ejection)\.\w+)`", PAGE)
    assert named
    assert [key for key in named if f"| `{key}` |" not in known] == []


async def test_the_commands_on_the_page_work_as_written(tmp_path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed (Debian package: curl)")
    (tmp_path / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) == sum(line.startswith("curl ") for line in lines) >= 12
    async with running(tmp_path, workers=2) as stack:
        extra = await stack.programs.start("extra", "engine", engine_arguments())
        real = {"8080": stack.url, "8081": stack.admin, "8003": extra.url}
        for line in lines:
            command = re.sub(r"http://127\.0\.0\.1:(\d+)", lambda found: real[found[1]], line)
            process = await asyncio.create_subprocess_shell(
                command,
                env={"PATH": "/usr/bin:/bin", "CURL_HOME": str(tmp_path)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            answer, complaint = await process.communicate()
            assert process.returncode == 0, (line, answer, complaint)

        async def as_told() -> bool:
            return [(row["id"], row["state"]) for row in await stack.rows()] == [(0, "ready")]

        await until(as_told, "the workers that were deleted to leave")


async def test_the_example_of_an_explanation_has_the_fields_of_a_real_one(stack) -> None:
    (example,) = [json.loads(block) for block in blocks("json")]
    headers = {"x-warmroute-explain": "1"}
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}
    async with stack.http.post(f"{stack.url}/v1/completions", json=body, headers=headers) as reply:
        real = decision_in(reply.headers["x-warmroute-explain"])
    assert list(real) == list(example)
    assert list(real["best"][0]) == list(example["best"][0])


async def test_a_hung_worker_is_down_and_removing_it_frees_its_requests(tmp_path) -> None:
    quick = ["--intervals-health-s", "0.1", "--timeouts-probe-s", "0.2"]
    async with running(tmp_path, workers=2, router=quick, speed=1) as stack:
        hung = stack.workers[0].process
        freeze(hung.pid)
        try:
            asked = [asyncio.create_task(stack.complete([i] * 200)) for i in range(8)]
            await stack.until_state(0, "down")
            assert "is down: GET /health" in stack.router.log.read_text()
            await stack.remove(0)
            assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 8
            assert await stack.metric("warmroute_retries_total") >= 1
        finally:
            hung.send_signal(signal.SIGCONT)


async def test_api_keys_are_required_only_for_completions(tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# who may\nsecret-one team-a  # the first\n")
    async with running(tmp_path, workers=1, router=["--api-keys-file", str(keys)]) as stack:
        for header, expected in (
            (None, 401),
            ("Bearer wrong", 401),
            ("Basic secret-one", 401),
            ("Bearer secret-one", 200),
        ):
            status, _ = await stack.complete([1], headers=header and {"Authorization": header})
            assert status == expected, header
        assert await stack.metric("warmroute_client_errors_total") == 3
        for path in ("/v1/models", "/health"):
            async with stack.http.get(f"{stack.url}{path}") as reply:
                assert reply.status == 200
        assert "secret-one" not in stack.router.log.read_text()


async def test_the_admin_port_answers_during_shutdown(tmp_path) -> None:
    async with running(tmp_path, workers=1, speed=5) as stack:
        body = {"model": MODEL, "prompt": [1], "max_tokens": 400, "stream": True}
        async with stack.http.post(f"{stack.url}/v1/completions", json=body) as reply:
            await reply.content.readline()
            stack.router.process.send_signal(signal.SIGTERM)

            async def stopping() -> bool:
                return "stopping: no new requests" in stack.router.log.read_text()

            await until(stopping, "the router to stop taking requests")
            assert await stack.metric("warmroute_inflight_requests") == 1
            rest = await reply.read()
        assert rest.rstrip().endswith(b"data: [DONE]")
        assert await asyncio.wait_for(stack.router.process.wait(), 10) == 0
