"""Tests that Helm and the router accept the commands and values of docs/kubernetes.md."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

import router.cli.main
from tests.deploy.chart import CHART, VERSIONS, Object, merged, objects, schema_errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PACKAGE = "dist/warmroute-*.tgz"  # what `make chart` writes
LINES = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


def values_of(line: str, file: Object) -> Object:
    """Return the values of a `helm upgrade --install` line; `file` is the page's latest
    values.yaml.
    """
    words = shlex.split(line)
    assert words[:3] == ["helm", "upgrade", "--install"]
    assert words[4] == PACKAGE
    values: Object = {}
    for flag, value in itertools.pairwise(words):
        if flag == "-f":
            values = merged(values, file)
        elif flag == "--set":
            values = merged(values, helm_python.parse_set_string(value))
        elif flag == "--set-json":
            key, _, text = value.partition("=")
            whole: Any = json.loads(text)
            for part in reversed(key.split(".")):
                whole = {part: whole}
            values = merged(values, whole)
    return values


def installs() -> list[Object]:
    """Return the values of each installation on the page, in order."""
    found: list[Object] = []
    file: Object = {}
    for kind, text in BLOCKS:
        if kind == "yaml":
            file = yaml.safe_load(text)
        for line in text.splitlines() if kind == "sh" else ():
            if line.startswith("helm upgrade"):
                found.append(values_of(line, file))
    inline = re.search(r"`(--set-json '[^`]*')`", PAGE)
    assert inline is not None
    return [*found, values_of(f"helm upgrade --install warmroute {PACKAGE} {inline[1]}", {})]


def test_make_targets_and_the_chart_package_on_the_page_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    wanted = set(re.findall(r"`make (\w+)`", PAGE))
    assert {"image", "chart"} <= wanted
    assert wanted <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    about = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert f"`{PACKAGE.replace('*', about['version'])}`" in PAGE


def test_each_installation_renders_and_is_valid() -> None:
    modes = set()
    for values in installs():
        modes.add(values.get("mode", "central"))
        for version in VERSIONS:
            assert [f for one in objects(values) for f in schema_errors(one, version)] == []
    assert modes == {"central", "sidecar", "picker"}


def test_values_shown_without_a_command_are_valid_too() -> None:
    shown = [yaml.safe_load(text) for kind, text in BLOCKS if kind == "yaml"]
    (monitored,) = [values for values in shown if "monitoring" in values]
    kinds = {one["kind"] for one in objects(monitored)}
    assert {"ServiceMonitor", "PrometheusRule"} <= kinds
    (adapter,) = [values for values in shown if "rules" in values]
    (rule,) = adapter["rules"]["custom"]
    scaled = objects(merged(monitored, {"autoscaling": {"enabled": True}}))
    (scaler,) = [one for one in scaled if one["kind"] == "HorizontalPodAutoscaler"]
    metric = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert rule["seriesQuery"].startswith(f"{metric}{{")


def test_each_way_to_give_the_tokenizer_renders_and_is_valid() -> None:
    """Each way to give the tokenizer renders and is valid: the page's blocks, the table's rows, and
    the line for mode sidecar with the engine above it.
    """
    section = PAGE.split("\n## Exact text: ")[1].split("\n## ")[0]
    ways = [yaml.safe_load(t) for t in re.findall(r"(?ms)^```yaml\n(.*?)^```", section)]
    volumes = re.findall(r"(?m)^- .*: `(\{.*\})`$", section)
    ways += [merged(ways[0], {"tokenizer": {"volume": None}}) for _ in volumes]
    for way, volume in zip(ways[-len(volumes) :], volumes, strict=True):
        way["tokenizer"]["volume"] = yaml.safe_load(volume)
    beside = [
        yaml.safe_load(t) for t in re.findall(r"`((?:extraVolumeMounts|config): .*?)`", section)
    ]
    ways.append(merged(*(v for v in installs() if v.get("mode") == "sidecar"), *beside))
    assert len(ways) == 6
    for values in ways:
        found = objects(values)
        assert [f for one in found for f in schema_errors(one, VERSIONS[-1])] == []
        (text,) = [one["data"]["router.yaml"] for one in found if one["kind"] == "ConfigMap"]
        folder = yaml.safe_load(text)["tokenizer"]
        mounts = [
            mount["mountPath"]
            for one in found
            if one["kind"] == "Deployment" and "redis" not in one["metadata"]["name"]
            for container in one["spec"]["template"]["spec"]["containers"]
            if container["name"] == "router"
            for mount in container["volumeMounts"]
        ]
        assert any(folder == mount or folder.startswith(f"{mount}/") for mount in mounts)


def test_objects_in_kubectl_commands_exist() -> None:
    there = {
        (one["kind"].lower(), one["metadata"]["name"])
        for values in installs()
        for one in objects(values)
    }
    asked = re.findall(r"(deployment|service|inferencepool)[/ ](warmroute[\w-]*)", "\n".join(LINES))
    assert asked
    assert set(asked) <= there
    services = [o for values in installs() for o in objects(values) if o["kind"] == "Service"]
    (named,) = re.findall(r"the Service `([\w-]+)`, port (\d+)", PAGE)
    assert named in {(s["metadata"]["name"], str(s["spec"]["ports"][0]["port"])) for s in services}
    for name, key in re.findall(
        r"create secret (?:generic|tls) ([\w-]+).*--(from-file|cert)", PAGE
    ):
        volumes = [
            (v["secret"]["secretName"], "cert" if "tls" in v["name"] else "from-file")
            for values in installs()
            for d in objects(values)
            if d["kind"] == "Deployment"
            for v in d["spec"]["template"]["spec"].get("volumes", [])
            if "secret" in v
        ]
        assert (name, key) in volumes


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("warmroute ")])
def test_the_router_accepts_the_commands_on_the_page(line) -> None:
    words = shlex.split(line.partition(">>")[0])
    assert router.cli.main._parser().parse_args(words[1:])


def test_metrics_keys_and_messages_on_the_page_exist() -> None:
    told = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in told for name in re.findall(r"\b(warmroute_\w+)", PAGE))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for path in re.findall(r"`((?:\w+\.)+\w+)`", PAGE):
        top = path.partition(".")[0]
        if top in values and top != "config":
            place: Any = values
            for part in path.split("."):
                place = place[part]
    source = "".join(
        (ROOT / "router" / "discovery" / name).read_text(encoding="utf-8")
        for name in ("kubernetes_watch.py", "kubernetes_source.py")
    )
    for message in ("the account may not list and watch", "it knows no ", "no InferencePool "):
        assert message in PAGE
        assert message in source
