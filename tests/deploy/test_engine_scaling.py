"""Tests of scaling engines from zero and back by the chart's scalers, evaluated by Prometheus' own
engine.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import (
    VERSIONS,
    Object,
    RefusedError,
    merged,
    objects,
    rendered_texts,
    schema_errors,
)
from tests.deploy.parsed import router_config

MODEL, ADAPTER = "meta-llama/Llama-3.1-8B", "sql"
CENTRAL: Object = {"discovery": {"services": ["vllm:http"]}}
ADDRESS = "http://prometheus.monitoring:9090"
BY_KEDA: Object = {
    "target": {"name": "vllm-llama"},
    "models": [MODEL, ADAPTER],
    "by": "keda",
    "prometheus": ADDRESS,
    "max": 4,
    "requestsPerReplica": 20,
}
BY_HPA: Object = {
    "target": {"name": "qwen", "kind": "StatefulSet"},
    "models": ["qwen"],
    "by": "hpa",
    "min": 1,
    "max": 2,
    "labels": {"namespace": "llm"},
}


def scaling(*entries: Object, **more: Any) -> Object:
    return merged(CENTRAL, {"engineScaling": list(entries)}, more)


def scalers(values: Object) -> list[Object]:
    kinds = ("ScaledObject", "HorizontalPodAutoscaler")
    return [one for one in objects(values) if one["kind"] in kinds]


def triggers(values: Object) -> dict[str, Object]:
    """Return the queries that KEDA sends to Prometheus, by the trigger's name."""
    (one,) = scalers(values)
    return {trigger["name"]: trigger["metadata"] for trigger in one["spec"]["triggers"]}


def test_a_scaler_is_valid_and_in_the_namespace_of_its_target() -> None:
    values = scaling(BY_KEDA, BY_HPA, discovery={"namespace": "engines"})
    for version in VERSIONS:
        assert [f for one in scalers(values) for f in schema_errors(one, version)] == []
    keda, hpa = scalers(values)
    assert keda["kind"] == "ScaledObject"
    assert {one["metadata"]["namespace"] for one in (keda, hpa)} == {"engines"}
    assert keda["spec"]["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "vllm-llama",
    }
    assert hpa["spec"]["scaleTargetRef"]["kind"] == "StatefulSet"
    assert (keda["spec"]["minReplicaCount"], keda["spec"]["maxReplicaCount"]) == (0, 4)
    assert (hpa["spec"]["minReplicas"], hpa["spec"]["maxReplicas"]) == (1, 2)
    wrong = merged(keda, {"spec": {"coolDownPeriod": 1}})
    assert schema_errors(wrong, VERSIONS[-1])


def test_waiting_models_include_the_scaled_and_the_configured_ones(tmp_path: Path) -> None:
    found = objects(
        scaling(BY_KEDA, BY_HPA, config={"waiting": {"models": ["x", "sql"], "wait_s": 600}})
    )
    (text,) = [one["data"]["router.yaml"] for one in found if one["kind"] == "ConfigMap"]
    file = tmp_path / "router.yaml"
    file.write_text(text, encoding="utf-8")
    config = router_config(["serve", "--config", str(file)], {})
    assert config.waiting.models == ("x", "sql", MODEL, "qwen")
    assert config.waiting.wait_s == 600
    (plain,) = [o["data"]["router.yaml"] for o in objects(CENTRAL) if o["kind"] == "ConfigMap"]
    assert "waiting" not in plain


# Ten-second samples of two routers: two quiet minutes in all, requests that wait for a minute and
# run for another, then nobody. Five of router b were refused.
QUIET, BUSY, LONG = [0] * 7, 6, 60
SAMPLES: dict[str, dict[str, list[int]]] = {
    "waiting_requests": {"a": [*QUIET, *[3] * BUSY, 0, *[0] * LONG]},
    "running_requests": {"a": [*QUIET, *[0] * BUSY, *[3] * BUSY, *[0] * LONG]},
    "incoming_requests_total": {"a": [*QUIET, *[3] * LONG], "b": [*QUIET, *[45] * LONG]},
}
for name in ("waiting_requests", "running_requests"):
    SAMPLES[name]["b"] = [40 * (count // 3) for count in SAMPLES[name]["a"]]
# Seconds, requests, and whether any came in the last two minutes.
EXPECTED = [(60, 0, 0), (90, 43, 1), (150, 43, 1), (200, 0, 0), (500, 0, 0)]


def router_samples(model: str = MODEL, namespace: str = "llm") -> list[Object]:
    """Return the routers' samples of a model, and those of `ADAPTER`, which are 0 throughout."""
    return [
        {
            "series": f'warmroute_{family}{{model="{one}", namespace="{namespace}", '
            f'job="warmroute", instance="{router}"}}',
            "values": " ".join(str(v if one == model else 0) for v in values),
        }
        for family, routers in SAMPLES.items()
        for router, values in routers.items()
        for one in (model, ADAPTER)
    ]


def evaluate(tmp_path: Path, given: list[Object], expected: list[Object]) -> None:
    """Check that queries yield the expected values; a failure shows promtool's own message."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian package: prometheus)")
    test = {"interval": "10s", "input_series": given, "promql_expr_test": expected}
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"evaluation_interval": "10s", "tests": [test]}))
    done = subprocess.run([program, "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def expected_at(seconds: int, expr: str, *values: float) -> Object:
    rows = [{"labels": "{}", "value": value} for value in values]
    return {"expr": expr, "eval_time": f"{seconds}s", "exp_samples": rows}


def test_the_queries_count_requests_of_all_routers_up_from_zero_and_back(tmp_path: Path) -> None:
    asked = triggers(scaling(BY_KEDA))
    requests, incoming = asked["requests"]["query"], asked["incoming"]["query"]
    given = [*router_samples(), *router_samples(namespace="staging"), *router_samples("another")]
    assert len({one["series"] for one in given}) < len(given)  # the adapter's, twice
    given = list({one["series"]: one for one in given}.values())
    expected = [expected_at(s, requests, count) for s, count, _ in EXPECTED]
    evaluate(
        tmp_path, given, expected + [expected_at(s, incoming, any_) for s, _, any_ in EXPECTED]
    )


def test_missing_series_do_not_count_as_zero(tmp_path: Path) -> None:
    """Missing series do not count as zero: Prometheus returns nothing, which KEDA treats as an
    error, and it changes nothing.
    """
    for metadata in triggers(scaling(BY_KEDA)).values():
        assert metadata["ignoreNullValues"] == "false"
        evaluate(tmp_path, router_samples("another", "other"), [expected_at(60, metadata["query"])])


def replicas(asked: dict[str, Object], values: dict[str, float], most: int) -> int:
    """Return the replicas that KEDA wants by its triggers' values, after the idle time."""
    active = any(values[name] > float(one["activationThreshold"]) for name, one in asked.items())
    wanted = [-(-values[name] // float(one["threshold"])) for name, one in asked.items()]
    return min(max(int(max(wanted)), 1), most) if active else 0


def test_replicas_follow_requests_and_a_refused_request_starts_one() -> None:
    asked = triggers(scaling(BY_KEDA))
    cases = {(0, 0): 0, (0, 1): 1, (1, 0): 1, (20, 1): 1, (43, 1): 3, (43, 0): 3, (900, 1): 4}
    for (requests, incoming), wanted in cases.items():
        values = {"requests": requests, "incoming": incoming}
        assert replicas(asked, values, most=4) == wanted, values


def test_no_engine_is_scaled_down_before_the_idle_time() -> None:
    for idle_s, remembered_s in ((900, 900), (86_400, 3_600)):
        (one,) = scalers(scaling(BY_KEDA | {"idleSeconds": idle_s}))
        spec = one["spec"]
        assert spec["cooldownPeriod"] == spec["initialCooldownPeriod"] == idle_s
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] == remembered_s
        windows = [
            int(m) * 60
            for t in spec["triggers"]
            for m in re.findall(r"(\d+)m", t["metadata"]["query"])
        ]
        assert spec["pollingInterval"] < min(windows)  # no request can come and end unnoticed


def test_the_operator_can_set_the_labels_that_select_series(tmp_path: Path) -> None:
    anywhere = triggers(scaling(BY_KEDA | {"labels": {}, "models": [MODEL]}))["requests"]["query"]
    given = [*router_samples(), *router_samples(namespace="staging")]
    evaluate(tmp_path, given, [expected_at(90, anywhere, 86)])
    chosen = triggers(scaling(BY_KEDA | {"labels": {"namespace": "staging"}}))
    evaluate(tmp_path, given, [expected_at(90, chosen["requests"]["query"], 43)])


REFUSED: list[tuple[Object, str]] = [
    (scaling(BY_KEDA, BY_KEDA | {"models": ["x"]}), "vllm-llama is named twice"),
    (scaling(BY_KEDA | {"min": 5}), "min of vllm-llama is above its max"),
    (scaling({**BY_KEDA, "prometheus": ""}), "keda needs prometheus, its address"),
    (scaling(BY_KEDA | {"target": {"name": "warmroute-router"}}), "are the routers"),
    (scaling(BY_HPA | {"models": ["a/b"]}), "a/b cannot be a label's value"),
    (scaling(BY_HPA | {"idleSeconds": 7200}), "an HPA remembers 3600 s at most"),
    (scaling(BY_KEDA, mode="sidecar"), "requests could not wait: take mode central"),
    (scaling(BY_KEDA, config={"waiting": {"wait_s": 0}}), "config.waiting.wait_s is 0"),
    (scaling(BY_KEDA | {"models": ['a"} or vector(1)']}), "models"),
    (scaling(BY_KEDA | {"models": ["a\\"]}), "models"),
    (scaling(BY_KEDA | {"models": []}), "models"),
    (scaling(BY_KEDA | {"prometheus": "prometheus:9090"}), "prometheus"),
    (scaling(BY_KEDA | {"by": "cron"}), "by"),
    (scaling(BY_KEDA | {"max": 0}), "max"),
    (scaling(BY_KEDA | {"idleSeconds": 5}), "idleSeconds"),
    (scaling({"target": {"name": "x"}, "by": "keda", "max": 1}), "models"),
]


@pytest.mark.parametrize(("values", "says"), REFUSED, ids=[says[:30] for _, says in REFUSED])
def test_invalid_scaling_values_are_refused_with_the_reason(values: Object, says: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(says)):
        rendered_texts(values)


def test_a_model_name_with_any_characters_stays_one_label_value(tmp_path: Path) -> None:
    for model in ("a{b}|c, d=~'e' %d", "模型-7b", "llama@v1"):
        asked = triggers(scaling(BY_KEDA | {"models": [model]}))
        evaluate(tmp_path, router_samples(model), [expected_at(90, asked["requests"]["query"], 43)])


def test_the_notes_list_what_scales_and_its_requirements() -> None:
    notes = rendered_texts(scaling(BY_KEDA, BY_HPA))["NOTES.txt"]
    assert "Deployment vllm-llama: 0 to 4 by keda" in notes
    assert "StatefulSet qwen: 1 to 2 by hpa" in notes
    assert "kubectl -n llm get scaledobject,hpa" in notes
    assert "scaledobject" not in rendered_texts(CENTRAL)["NOTES.txt"]
    assert "HPAScaleToZero" not in notes
    assert "HPAScaleToZero" in rendered_texts(scaling(BY_HPA | {"min": 0}))["NOTES.txt"]


PAGE = (Path(__file__).parents[2] / "docs" / "scale-to-zero.md").read_text(encoding="utf-8")
SHOWN = [yaml.safe_load(text) for text in re.findall(r"(?ms)^```yaml\n(.*?)^```", PAGE)]


def test_the_values_on_the_page_render_and_are_valid() -> None:
    (values,) = [one for one in SHOWN if "engineScaling" in one]
    found = objects(values)
    assert [f for one in found for f in schema_errors(one, VERSIONS[-1])] == []
    (scaler,) = scalers(values)
    left_out = {key: one for key, one in values["engineScaling"][0].items() if key in NEEDED}
    assert scaler == scalers(merged(values, {"engineScaling": [left_out]}))[0]  # the usual ones
    assert "helm upgrade --install warmroute dist/warmroute-*.tgz -n llm -f values.yaml" in PAGE


NEEDED = ("target", "models", "by", "prometheus", "max")


def test_the_adapters_rules_serve_the_metrics_of_the_hpa(tmp_path: Path) -> None:
    (adapter,) = [one for one in SHOWN if "rules" in one]
    rules = {rule["name"]["as"]: rule for rule in adapter["rules"]["external"]}
    (hpa,) = scalers(scaling(BY_HPA))
    asked = {m["external"]["metric"]["name"]: m["external"] for m in hpa["spec"]["metrics"]}
    assert asked.keys() == rules.keys()
    expected = []
    for name, of in (("warmroute_model_requests", 1), ("warmroute_model_asked", 2)):
        selector = asked[name]["metric"]["selector"]
        (one,) = selector["matchExpressions"]
        matchers = [f'{label}="{value}"' for label, value in selector["matchLabels"].items()]
        matchers.append(f'{one["key"]}=~"{"|".join(one["values"])}"')  # as the adapter writes `In`
        query = rules[name]["metricsQuery"].replace("<<.LabelMatchers>>", ",".join(matchers))
        expected += [expected_at(row[0], query, row[of]) for row in EXPECTED]
    evaluate(tmp_path, [*router_samples("qwen"), *router_samples("other", "staging")], expected)
    assert {n: m["target"]["averageValue"] for n, m in asked.items()} == {
        "warmroute_model_requests": "32",
        "warmroute_model_asked": "1",
    }


def test_keys_and_series_on_the_page_exist() -> None:
    reference = Path(__file__).parents[2] / "docs" / "reference"
    keys = (reference / "configuration.md").read_text(encoding="utf-8")
    for key in re.findall(r"`(waiting\.\w+|drain_s)`", PAGE):
        assert f"| `{key}` |" in keys, key
    told = (reference / "metrics.md").read_text(encoding="utf-8")
    made = {"warmroute_model_requests", "warmroute_model_asked"}
    for name in {*re.findall(r"\bwarmroute_\w+", PAGE)} - made:
        assert f"`{name}`" in told, name
    for one in SHOWN:
        for entry in one.get("engineScaling", ()):
            assert entry["models"]


@pytest.mark.parametrize(("running", "waiting", "waits"), [(0, 0, 0), (2, 0, 1), (0, 1, 1)])
def test_an_engine_ends_once_no_request_runs_there(
    tmp_path: Path, running: int, waiting: int, waits: int
) -> None:
    """An engine ends when no request runs there: the page's preStop script runs with a fake `curl`
    that shows an idle engine after the first call.
    """
    (pod,) = [one for one in SHOWN if "containers" in one]
    (container,) = pod["containers"]
    shell, flag, script = container["lifecycle"]["preStop"]["exec"]["command"]
    for name, text in {
        "curl": f"test -e asked && r=0 w=0 || r={running} w={waiting}\ntouch asked\n"
        """printf 'vllm:num_requests_running{engine="0"} %s.0\\n' $r
printf 'vllm:num_requests_waiting{engine="0"} %s.0\\nvllm:prompt_tokens_total 7.0\\n' $w""",
        "sleep": "echo $1 >> slept",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    subprocess.run([shell, flag, script], cwd=tmp_path, env={"PATH": path}, check=True, timeout=60)
    assert (tmp_path / "slept").read_text().split() == ["10", *["2"] * waits]
    assert pod["terminationGracePeriodSeconds"] > 600 + 10  # drain_s
