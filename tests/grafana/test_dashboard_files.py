"""The files of the dashboards: what the script writes, whole, in order, and readable."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from grafana.drawing import COOL, WARM, colors_of
from grafana.make_dashboards import DASHBOARDS, file_of, pretty, written
from router.metrics.requests import _GAP_SECONDS, _SECONDS
from tests.grafana.shown import FILES, PANELS, targets

UNITS = {"short", "percentunit", "s", "reqps", "bytes", "Bps"}
every_dashboard = pytest.mark.parametrize("name", FILES)


def test_the_files_are_what_the_script_writes() -> None:
    for dashboard in DASHBOARDS:
        told = "run: python -m grafana.make_dashboards"
        assert file_of(dashboard).read_text(encoding="utf-8") == written(dashboard), told
        assert pretty(json.loads(written(dashboard))) + "\n" == written(dashboard)


def test_panels_are_whole_and_in_plain_words() -> None:
    for panel in PANELS.values():
        assert panel["description"].endswith("."), panel["title"]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or re.fullmatch(r"suffix: [a-z/]+( s)?", unit), panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == sorted(set(refs)), panel["title"]


def test_what_is_divided_or_counted_has_the_unit_of_it() -> None:
    """A share of one counter is a share; a histogram of seconds is seconds."""
    for panel in PANELS.values():
        unit = panel["fieldConfig"]["defaults"]["unit"]
        if any("_seconds_bucket" in expr and "quantile" in expr for expr in targets(panel)):
            assert unit == "s", panel["title"]
        if panel["type"] != "heatmap" and all(
            re.fullmatch(r"sum[^/]*\(rate\([^/]*\)\)", expr) for expr in targets(panel)
        ):
            assert unit in {"reqps", "Bps"} or "/s" in unit or "per s" in unit, panel["title"]


@every_dashboard
def test_a_dashboard_is_in_order(name) -> None:
    file = FILES[name]
    assert file["schemaVersion"] >= 39
    assert file["title"] == f"warmroute {name}"
    numbers = [panel["id"] for panel in file["panels"]]
    assert len(set(numbers)) == len(numbers)
    titles = [panel["title"] for panel in file["panels"] if panel["type"] != "row"]
    assert sorted(titles) == sorted(set(titles))
    (link,) = file["links"]
    assert link["tags"] == file["tags"], "the dashboards find each other by their tag"


@every_dashboard
def test_no_panel_lies_on_another_or_beyond_the_edge(name) -> None:
    places = [panel["gridPos"] for panel in FILES[name]["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in itertools.combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (a, b)


@every_dashboard
def test_choices_are_the_readers(name) -> None:
    """No identifier of somebody's Grafana is baked in, and all that is asked for can be chosen."""
    file = FILES[name]
    text = json.dumps(file)
    assert set(re.findall(r'"uid": "([^"]*)"', text)) == {"${datasource}"}
    assert "uid" not in file
    variables = {variable["name"]: variable for variable in file["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    used = {found for panel in file["panels"] for found in re.findall(r"\$\{?(\w+)", str(panel))}
    assert used - {"__rate_interval", "__range"} <= set(variables)
    assert set(variables) - used <= {"worker", "top"}, "a choice that changes nothing"


def test_only_a_few_of_a_thousand_workers_are_drawn() -> None:
    """Whatever has a series a worker or an engine is cut to the highest or the lowest of them."""
    for (dashboard, title), panel in PANELS.items():
        for target in panel["targets"]:
            if re.search(r"\{\{(worker|instance)\}\}", target["legendFormat"]):
                assert re.match(r"(top|bottom)k\(\$top, ", target["expr"]), (dashboard, title)


def test_targets_are_bounds_of_the_buckets() -> None:
    """Between two bounds nobody knows how many answers there were."""
    variables = {v["name"]: v for v in FILES["slo"]["templating"]["list"]}
    assert {float(o["value"]) for o in variables["ttft"]["options"]} <= set(_SECONDS)
    assert {float(o["value"]) for o in variables["tpot"]["options"]} <= set(_GAP_SECONDS)


def test_names_in_one_panel_have_different_colours() -> None:
    for panel in PANELS.values():
        rules = panel["fieldConfig"]["overrides"]
        colors = [rule["properties"][0]["value"]["fixedColor"] for rule in rules]
        assert len(set(colors)) == len(colors), panel["title"]


def test_trouble_is_warm_and_all_else_is_not_while_there_are_other_colours() -> None:
    colors = colors_of(("ready", "down", "draining", "ejected"))
    assert [color in WARM for color in colors.values()] == [False, True, False, True]
    many = colors_of(tuple(f"name {number}" for number in range(len(COOL) + 1)))
    assert [color in WARM for color in many.values()] == [False] * len(COOL) + [True]
