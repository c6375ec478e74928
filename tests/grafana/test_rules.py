"""Tests of recording rules and alerts: they are valid, promtool tests them, and each alert has an
entry in the runbook.
"""

from __future__ import annotations

import json
import re

import pytest
import yaml

from grafana.make_dashboards import DASHBOARDS, file_of
from grafana.panels_slo import OF_CLIENTS, OF_ROUTER, OF_WORKERS
from tests.grafana.monitoring import ROOT, RULES, promtool, run

RUNBOOK = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL))
ALERTS = [
    rule
    for group in yaml.safe_load((RULES / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
RECORDED = [
    rule
    for group in yaml.safe_load((RULES / "recording.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
TESTS = sorted((RULES / "tests").glob("*.yml"))


def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    checked = run([promtool(), "check", "config", str(RULES / "prometheus.yml")])
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for file in ("recording.yml", "alerts.yml"):
        linted = run([promtool(), "check", "rules", "--lint-fatal", str(RULES / file)])
        assert linted.returncode == 0, linted.stdout + linted.stderr


def test_promtool_accepts_the_configuration_for_kubernetes(tmp_path) -> None:
    """Promtool accepts the configuration for Kubernetes, without its discovery, since Debian's
    Prometheus is built without Kubernetes.
    """
    config = yaml.safe_load((RULES / "kubernetes.yml").read_text(encoding="utf-8"))
    for job in config["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        job["static_configs"] = [{"targets": ["127.0.0.1:1"]}]
    config["rule_files"] = [str(RULES / file) for file in config["rule_files"]]
    file = tmp_path / "prometheus.yml"
    file.write_text(json.dumps(config))
    checked = run([promtool(), "check", "config", str(file)])
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("file", TESTS, ids=lambda file: file.stem)
def test_alerts_fire_for_their_fault_and_for_nothing_else(file) -> None:
    tested = run([promtool(), "test", "rules", str(file)])
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_is_tested_to_fire_and_not_to_fire() -> None:
    fires, silent = set(), set()
    for file in TESTS:
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]:
            for test in group["alert_rule_test"]:
                name = test["alertname"]
                for expected in test["exp_alerts"]:
                    fires.add((name, expected["exp_labels"]["severity"]))
                if not test["exp_alerts"]:
                    silent.add(name)
    assert fires == {(alert["alert"], alert["labels"]["severity"]) for alert in ALERTS}
    assert silent == {alert["alert"] for alert in ALERTS}


def test_every_alert_has_a_severity_a_summary_and_a_runbook_link() -> None:
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert set(alert["annotations"]) == {"summary", "runbook"}
        assert "{{ $labels." in alert["annotations"]["summary"]
        anchor = alert["alert"].lower()
        assert alert["annotations"]["runbook"] == f"docs/operations.md#{anchor}"


def test_the_runbook_has_exactly_one_entry_for_each_alert() -> None:
    assert list(dict.fromkeys(alert["alert"] for alert in ALERTS)) == sorted(
        ENTRIES, key=lambda name: [alert["alert"] for alert in ALERTS].index(name)
    )


@pytest.mark.parametrize("name", ENTRIES)
def test_a_runbook_entry_has_meaning_diagnosis_and_action_in_order(name) -> None:
    parts = re.findall(r"^\*\*(\w+)\.\*\* \S", ENTRIES[name], re.MULTILINE)
    assert parts == ["Means", "Look", "Do"]
    named = set(re.findall(r"Warmroute[A-Z]\w+", ENTRIES[name]))
    assert named <= set(ENTRIES)


def test_panels_link_to_runbook_entries_that_exist() -> None:
    rows = [row for each in DASHBOARDS for row in (each.well, *each.details)]
    linked = {panel.alert for row in rows for panel in row.panels}
    assert linked - {""} <= set(ENTRIES)
    links = re.findall(
        r'"\$\{runbook\}#(\w+)"', "".join(file_of(d).read_text() for d in DASHBOARDS)
    )
    assert set(links) <= {name.lower() for name in ENTRIES}
    assert len(set(links)) > 8


def test_keys_and_files_quoted_in_the_runbook_exist() -> None:
    configuration = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    keys = re.findall(r"`((?:limits|timeouts|intervals)\.\w+)`", RUNBOOK)
    assert keys
    assert [key for key in keys if f"| `{key}` |" not in configuration] == []
    files = re.findall(r"\]\(([^)#]+)", RUNBOOK)
    assert [file for file in files if not (ROOT / "docs" / file).resolve().is_file()] == []


def test_log_lines_and_paths_quoted_in_the_runbook_exist() -> None:
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("router", "engine")
        for path in (ROOT / folder).rglob("*.py")
    )
    for quoted in re.findall(r"[Ll]og: `([^`]+)`", RUNBOOK):
        assert quoted.strip(":") in source, quoted
    for path in re.findall(r"127\.0\.0\.1:8081(/\w+)", RUNBOOK):
        assert f'"{path}"' in source or f'"{path}/' in source, path


def test_rules_and_dashboards_group_error_codes_by_the_same_causes() -> None:
    """Rules and dashboards divide the error codes among the same three groups of blame."""
    recorded = {rule["record"]: rule["expr"] for rule in RECORDED}
    codes = f'code!~"{OF_CLIENTS}|{OF_WORKERS}|{OF_ROUTER}"'
    assert codes in recorded["instance:warmroute_shed_requests:rate5m"]
    assert f'code="{OF_ROUTER}"' in recorded["instance:warmroute_own_errors:rate5m"]


def test_every_recorded_series_is_used_or_saves_a_slow_query() -> None:
    """Every recorded series is used in a query or shows what would take a query long, because it
    costs CPU time at each evaluation.
    """
    used = "".join(rule["expr"] for rule in (*ALERTS, *RECORDED))
    unused = {rule["record"] for rule in RECORDED if used.count(rule["record"]) == 0}
    assert unused == {
        "instance:warmroute_imbalance_seconds:gap",  # a month of it says what a policy is worth
        "instance:warmroute_engine_step_seconds:mean5m",  # of each engine, for comparisons
    }
