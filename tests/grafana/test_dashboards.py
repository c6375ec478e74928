"""The dashboard asks for what there is, shows all there is, and a real Prometheus answers it."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import pytest_asyncio

from grafana.make_dashboard import BY_DIGIT, BY_NAME, FILE, dashboard, pretty
from tests.grafana.monitoring import (
    exposition,
    lively,
    prometheus,
    promtool,
    run,
    samples,
    tokenizing,
)
from tests.live.stack import running

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Series of the router that no panel shows, and why.
NOT_SHOWN = {
    "warmroute_time_to_first_token_seconds_count": "the quantiles come from the buckets",
    "warmroute_time_to_first_token_seconds_sum": "the quantiles come from the buckets",
    "warmroute_inter_token_seconds_count": "the quantiles come from the buckets",
    "warmroute_inter_token_seconds_sum": "the quantiles come from the buckets",
    "warmroute_request_seconds_count": "the quantiles come from the buckets",
    "warmroute_request_seconds_sum": "the quantiles come from the buckets",
    "warmroute_request_log_lines_total": "of a log that is off by default; it logs its trouble",
    "warmroute_kv_state_saves_total": "of a file that is off by default; an alert tells of trouble",
    "warmroute_kv_state_bytes": "of a file that is off by default",
    "warmroute_kv_state_age_seconds": "of a file that is off by default",
    "warmroute_session_blocks": "a full table is no trouble; what it forgets is shown",
}
DASHBOARD = json.loads(FILE.read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    router = tokenizing(tmp_path_factory.mktemp("model"))
    logs = tmp_path_factory.mktemp("logs")
    async with running(logs, workers=2, router=router) as stack, lively(stack):
        yield stack


def asked() -> set[str]:
    """Names of all metrics in all panels."""
    return {name for expr in QUERIES for name in re.findall(r"\bwarmroute_\w+", expr)}


async def test_the_file_is_what_the_script_writes() -> None:
    current = pretty(dashboard()) + "\n"
    assert FILE.read_text(encoding="utf-8") == current, "run: python -m grafana.make_dashboard"
    assert json.loads(current) == dashboard()


async def test_panels_are_whole_and_in_plain_words() -> None:
    assert DASHBOARD["schemaVersion"] >= 39
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == sorted(set(refs)), panel["title"]
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


async def test_no_panel_lies_on_another_or_beyond_the_edge() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in itertools.combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (a, b)


async def test_the_data_source_is_the_readers_choice() -> None:
    """No identifier of somebody's Grafana is baked in."""
    text = FILE.read_text(encoding="utf-8")
    assert set(re.findall(r'"uid": "([^"]*)"', text)) == {"${datasource}"}
    assert "uid" not in DASHBOARD
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert all('instance="$router"' in expr for expr in QUERIES)


async def test_names_in_one_panel_have_different_colours() -> None:
    for panel in PANELS:
        colors = [rule["properties"][0]["value"]["fixedColor"] for rule in _overrides(panel)]
        assert len(set(colors)) == len(colors), panel["title"]
    assert set(BY_NAME.values()) <= set(BY_DIGIT)


def _overrides(panel):
    return panel["fieldConfig"]["overrides"]


async def test_every_metric_in_a_panel_exists(stack) -> None:
    there = samples(await exposition(stack))
    assert asked() <= set(there), f"not in /metrics: {sorted(asked() - set(there))}"


async def test_every_metric_is_on_the_dashboard_or_listed_with_a_reason(stack) -> None:
    there = {name for name in samples(await exposition(stack)) if name.startswith("warmroute_")}
    assert there - asked() == set(NOT_SHOWN)


async def test_every_value_of_a_label_that_has_a_colour_of_its_own_is_known(stack) -> None:
    """A new state, code or kind must not appear in a colour that somebody else has."""
    text = await exposition(stack)
    values = set(re.findall(r"\b(?:state|code|kind)=\"(\w+)\"", text))
    assert values <= set(BY_NAME)


async def test_promtool_finds_nothing_to_complain_of_in_the_metrics(stack) -> None:
    text = await exposition(stack)
    # It dislikes that times of creation are shown as gauges of their own; the library adds them.
    lines = [line for line in text.splitlines(keepends=True) if "_created" not in line]
    checked = run([promtool(), "check", "metrics"], "".join(lines))
    assert checked.returncode == 0, checked.stdout + checked.stderr


async def test_a_real_prometheus_answers_every_panel(stack, tmp_path) -> None:
    async with prometheus(stack, tmp_path) as server:

        def resolved(expr: str) -> str:
            return expr.replace("$router", server.target).replace("$__rate_interval", "5s")

        await server.until_data(resolved(expr) for expr in QUERIES)
        # The regular expressions of labels must pick, not just parse.
        (ready,) = await server.query(
            f'sum(warmroute_worker_state{{instance="{server.target}", state="ready"}})'
        )
        assert float(ready["value"][1]) >= 2
