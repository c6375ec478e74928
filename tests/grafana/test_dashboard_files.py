"""Tests of the dashboard files: equal to what the script writes, complete, in order, and
readable.
"""

from __future__ import annotations

import itertools
import json
import re

import pytest
import yaml

from grafana.drawing import COOL, ORANGE, RED, WARM, Dashboard, Panel, colors_of
from grafana.limits import LEAST, RULES
from grafana.make_dashboards import DASHBOARDS, file_of, pretty, written
from router.metrics.requests import _GAP_SECONDS, _SECONDS
from tests.grafana.shown import FILES, NOT_COLOURED, PANELS, targets

ALERTS = [
    rule
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]

UNITS = {"short", "percentunit", "s", "reqps", "bytes", "Bps"}
every_dashboard = pytest.mark.parametrize("name", FILES)


def every_panel(dashboard: Dashboard) -> list[Panel]:
    """Return the dashboard's panels, those in folded rows included."""
    return [panel for row in (dashboard.well, *dashboard.details) for panel in row.panels]


def test_the_dashboard_files_equal_the_output_of_their_script() -> None:
    for dashboard in DASHBOARDS:
        told = "run: python -m grafana.make_dashboards"
        assert file_of(dashboard).read_text(encoding="utf-8") == written(dashboard), told
        assert pretty(json.loads(written(dashboard))) + "\n" == written(dashboard)


def test_each_panel_has_a_description_unit_and_legend() -> None:
    for panel in PANELS.values():
        assert panel["description"].endswith("."), panel["title"]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or re.fullmatch(r"suffix: [a-z/]+( s)?", unit), panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == sorted(set(refs)), panel["title"]


def test_quotients_and_durations_have_the_right_unit() -> None:
    """A panel that shows a quotient of one counter has the unit of a share, and one of a histogram
    of seconds has seconds.
    """
    for panel in PANELS.values():
        unit = panel["fieldConfig"]["defaults"]["unit"]
        if any("_seconds_bucket" in expr and "quantile" in expr for expr in targets(panel)):
            assert unit == "s", panel["title"]
        if panel["type"] != "heatmap" and all(
            re.fullmatch(r"sum[^/]*\(rate\([^/]*\)\)", expr) for expr in targets(panel)
        ):
            assert unit in {"reqps", "Bps"} or "/s" in unit or "per s" in unit, panel["title"]


@every_dashboard
def test_a_dashboard_has_unique_ids_and_titles(name) -> None:
    file = FILES[name]
    assert file["schemaVersion"] >= 39
    assert file["title"] == f"warmroute {name}"
    everything = [one for panel in file["panels"] for one in (panel, *panel.get("panels", ()))]
    numbers = [panel["id"] for panel in everything]
    assert len(set(numbers)) == len(numbers)
    titles = [panel["title"] for panel in everything if panel["type"] != "row"]
    assert sorted(titles) == sorted(set(titles))
    assert [link["title"] for link in file["links"]] == ["slo", "router", "fleet", "engine"]
    for link in file["links"]:
        assert link["url"] == f"/d/{FILES[link['title']]['uid']}"


@every_dashboard
def test_a_dashboard_opens_with_its_health_row_and_collapses_the_others(name) -> None:
    first, *others = FILES[name]["panels"]
    assert (first["type"], first["title"], first["collapsed"]) == ("row", "Is it well?", False)
    folded = [panel for panel in others if panel["type"] == "row"]
    assert folded == others[-len(folded) :]
    assert all(row["collapsed"] and row["panels"] for row in folded)
    critical, warnings = others[:2]
    assert (critical["title"], warnings["title"]) == ("Critical alerts", "Warnings")
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in others[: -len(folded)])
    assert height <= 20, "it must fit on one screen"


@every_dashboard
def test_no_panel_overlaps_another_or_exceeds_the_width(name) -> None:
    shown = FILES[name]["panels"]
    rows = [row for row in shown if row["type"] == "row" and row["panels"]]
    for panels in (shown, *(row["panels"] for row in rows)):
        places = [panel["gridPos"] for panel in panels]
        assert all(place["x"] + place["w"] <= 24 for place in places)
        for a, b in itertools.combinations(places, 2):
            beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
            assert beside or above, (a, b)
    for row in rows:  # Grafana moves the rows below by what is inside
        assert min(panel["gridPos"]["y"] for panel in row["panels"]) == row["gridPos"]["y"] + 1


@every_dashboard
def test_readers_can_choose_every_variable(name) -> None:
    """Dashboard files name no particular Grafana, and readers can choose every variable
    in a query.
    """
    file = FILES[name]
    uids = re.findall(r'"uid": "([^"]*)"', json.dumps(file))
    assert set(uids) == {"${datasource}", f"warmroute-{name}"}
    assert file["uid"] == f"warmroute-{name}"
    variables = {variable["name"]: variable for variable in file["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    used = set(re.findall(r"\$\{?(\w+)", str(file["panels"])))
    assert used - {"__rate_interval", "__range"} <= set(variables)
    assert set(variables) - used <= {"worker", "top"}, "a choice that changes nothing"


def test_a_variable_is_multi_valued_on_all_dashboards_or_on_none() -> None:
    kinds: dict[str, set[bool]] = {}
    for file in FILES.values():
        for variable in file["templating"]["list"]:
            kinds.setdefault(variable["name"], set()).add(variable.get("multi", False))
    assert [name for name, several in kinds.items() if len(several) > 1] == []


def test_queries_per_worker_are_limited_to_the_top_few() -> None:
    """Every query with a series for each worker or engine is limited to the highest or lowest few,
    so that a thousand workers can be read.
    """
    for (dashboard, title), panel in PANELS.items():
        for target in panel["targets"]:
            if re.search(r"\{\{(worker|instance)\}\}", target["legendFormat"]):
                assert re.match(r"(top|bottom)k\(\$top, ", target["expr"]), (dashboard, title)


def test_colours_change_at_the_thresholds_of_the_alerts() -> None:
    for dashboard in DASHBOARDS:
        for panel in every_panel(dashboard):
            drawn = PANELS[dashboard.name, panel.title]["fieldConfig"]["defaults"]
            steps = drawn["thresholds"]["steps"] if panel.limits else []
            changes = {
                step["value"]: (before["color"], step["color"])
                for before, step in itertools.pairwise(steps)
            }
            assert sorted(changes) == sorted(limit.value for limit in panel.limits)
            for limit in panel.limits:
                bad = RED if limit.severity == "critical" else ORANGE
                assert changes[limit.value][limit.side == "above"] == bad, panel.title
                if limit.alert:
                    assert limit.value in limits_of(limit.alert, limit.severity), panel.title
                else:
                    assert "ALERTS{" in panel.queries[0][0]


def limits_of(alert: str, severity: str) -> set[float]:
    """Return the numbers that an alert's rule compares with, as a panel shows them."""
    (rule,) = [
        rule["expr"]
        for rule in ALERTS
        if (rule["alert"], rule["labels"]["severity"]) == (alert, severity)
    ]
    above = {float(number) for number in re.findall(r"(?:[<>]|== |,)\s*([0-9.]+)", rule)}
    nothing = {1.0} if " unless " in rule or "== 0" in rule else set()
    return above - {0} | ({LEAST} if "> 0" in rule else set()) | nothing


def test_every_alert_threshold_colours_a_panel_or_is_listed_with_a_reason() -> None:
    panels = [panel for dashboard in DASHBOARDS for panel in every_panel(dashboard)]
    coloured = {limit.alert for panel in panels for limit in panel.limits}
    assert {rule["alert"] for rule in ALERTS} - coloured == set(NOT_COLOURED)


def test_a_panel_with_a_text_for_0_has_a_threshold() -> None:
    said = [panel for dashboard in DASHBOARDS for panel in every_panel(dashboard) if panel.says]
    assert len(said) > 8
    assert all(panel.limits for panel in said)


def test_latency_targets_are_bounds_of_histogram_buckets() -> None:
    """Targets of latency are bounds of histogram buckets, because a histogram cannot tell how many
    answers lie between two bounds.
    """
    variables = {v["name"]: v for v in FILES["slo"]["templating"]["list"]}
    assert {float(o["value"]) for o in variables["ttft"]["options"]} <= set(_SECONDS)
    assert {float(o["value"]) for o in variables["tpot"]["options"]} <= set(_GAP_SECONDS)


def test_series_in_one_panel_have_different_colours() -> None:
    for panel in PANELS.values():
        rules = panel["fieldConfig"]["overrides"]
        colors = [rule["properties"][0]["value"]["fixedColor"] for rule in rules]
        assert len(set(colors)) == len(colors), panel["title"]


def test_only_bad_states_have_warm_colours_while_others_are_left() -> None:
    colors = colors_of(("ready", "down", "draining", "ejected"))
    assert [color in WARM for color in colors.values()] == [False, True, False, True]
    many = colors_of(tuple(f"name {number}" for number in range(len(COOL) + 1)))
    assert [color in WARM for color in many.values()] == [False] * len(COOL) + [True]
