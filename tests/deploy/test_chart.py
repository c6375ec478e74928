"""Tests of docs/deploy/helm/warmroute: every variant renders, is valid, and fits the router."""

from __future__ import annotations

import copy
import itertools
import json
import re
import shutil
import tarfile
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import pytest
import tokenizers
import yaml

import release.chart
from router.config.keys import keys_of
from router.discovery.source import InferencePoolSpec, KubernetesSpec, parse_source
from router.settings.schema import Config
from router.settings.terms import tokenizer_terms
from router.tokens.encoders import encoders_of
from tests.deploy import chart
from tests.deploy.chart import (
    CHART,
    Object,
    RefusedError,
    first_requests,
    merged,
    objects,
    rendered_texts,
    schema_errors,
)
from tests.deploy.parsed import router_config
from tests.engine.model_dirs import tokenizer_text, write_model
from tests.router.settings.config_values import another_value, nested

ROOT = Path(__file__).parents[2]
SOURCES = {"discovery": {"sources": ["dns:engines:8000,kind=vllm"]}}
SERVICE = {"discovery": {"services": ["vllm:http", "other"], "options": "kind=vllm,weight=2"}}
POOL = {"discovery": {"inferencePools": ["chat", "embed"]}}
ALL_MONITORING = {
    "monitoring": {
        "namespace": "observability",
        "serviceMonitor": {"enabled": True, "labels": {"release": "prom"}, "interval": "15s"},
        "rules": {"enabled": True, "labels": {"release": "prom"}},
        "dashboards": {"enabled": True},
    }
}
SECRET = {"redis": {"mode": "given", "secret": {"name": "redis", "key": "url"}, "port": 6380}}
KEYS = {
    "keys": {"client": "client-keys", "admin": "admin-keys"},
    "networkPolicy": {"enabled": False},
}
PVC = {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
ENGINE = {
    "engines": {"selector": {"llm": "chat", "tier": "gpu"}, "httpPorts": [8000, 8001]},
    "sidecar": {
        "engine": {
            "container": {
                "image": "vllm:1",
                "command": ["vllm", "serve", "/models/m"],
                "args": ["--port", "8000"],
                "resources": {"limits": {"nvidia.com/gpu": 1}},
                "securityContext": {"readOnlyRootFilesystem": False},
                "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
            },
            "volumes": [{"name": "models", **PVC}],
        }
    },
}
PODS = {
    "priorityClassName": "high",
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "podLabels": {"team": "llm"},
    "podAnnotations": {"example.com/a": "b"},
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "tokenizer": {"volume": {"persistentVolumeClaim": {"claimName": "tokenizer"}}},
    "extraVolumes": [{"name": "logs", "emptyDir": {"sizeLimit": "2Gi"}}],
    "extraVolumeMounts": [{"name": "logs", "mountPath": "/var/log/warmroute"}],
    "extraInitContainers": [
        {"name": "waits", "image": "busybox:1", "securityContext": {"runAsUser": 1000}}
    ],
    "image": {"repository": "registry.example/warmroute", "tag": "1.2", "pullSecrets": ["pull"]},
    "service": {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}},
    "podDisruptionBudget": {"maxUnavailable": "25%"},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}],
        "extraEgress": [{"ports": [{"port": 4318}]}],
    },
    "tls": {"client": "front-tls"},
    "config": {"timeouts": {"shutdown_s": 300}, "policy": "hybrid", "limits": {"hold_s": 5}},
}
SCALED = {"autoscaling": {"enabled": True, "cpuPercent": 80, "minReplicas": 3}}
BY_CPU = {"autoscaling": {"enabled": True, "inflightRequests": 0, "cpuPercent": 70}}
GATEWAY = {
    "picker": {
        "failureMode": "FailOpen",
        "front": True,
        "pool": {"name": "chat"},
        "httpRoute": {
            "create": True,
            "gateway": "inference",
            "gatewayNamespace": "gateways",
            "hostnames": ["llm.example.com"],
        },
    },
    "tls": {"picker": "picker-tls"},
    "config": {"picker": {"endpoints": 3, "objectives": ["chat=-1"]}},
}
YOUR_POOL = POOL | {
    "picker": {"pool": {"create": False, "name": "chat"}},
    "redis": {"mode": "none"},
}
ELSEWHERE = {
    "discovery": {"services": ["vllm"], "inferencePools": ["chat"], "namespace": "engines"}
}


_EACH = {
    "plain": {},
    "monitored": ALL_MONITORING,
    "secret": SECRET,
    "keys": KEYS,
    "pods": PODS,
    "scaled": merged(SCALED, {"redis": {"mode": "given", "url": "redis://r.example:6379"}}),
    "by cpu": BY_CPU,
    "everything": merged(
        ALL_MONITORING,
        SECRET,
        PODS,
        SCALED,
        {"keys": KEYS["keys"]},
        {"monitoring": {"serviceMonitor": {"keySecret": {"name": "scrape", "key": "key"}}}},
    ),
}
_MODES = {
    "central": {
        "sources": SOURCES,
        "service": SERVICE,
        "pool": POOL,
        "elsewhere": ELSEWHERE,
        "by hand": {"config": {"workers": ["http://10.0.0.1:8000"]}},
    },
    "sidecar": {"timed": {}, "engine": ENGINE},
    "picker": {"own pool": ENGINE, "gateway": GATEWAY, "your pool": YOUR_POOL},
}
VARIANTS: dict[str, Object] = {
    f"{mode}, {how}, {with_}": merged({"mode": mode}, values, more)
    for mode, kinds in _MODES.items()
    for (how, values), (with_, more) in itertools.product(kinds.items(), _EACH.items())
}
each_variant = pytest.mark.parametrize("name", VARIANTS)


@cache
def rendered(name: str) -> list[Object]:
    """Return the Kubernetes objects of a variant of the chart; callers must not change them."""
    return objects(VARIANTS[name])


def variant_values(name: str) -> Object:
    """Return a variant's values merged with the chart's defaults."""
    merged_values: Object = chart._loaded().merge_values(VARIANTS[name])
    return merged_values


def of_kind(found: list[Object], kind: str) -> list[Object]:
    return [one for one in found if one["kind"] == kind]


def deployment(found: list[Object]) -> Object:
    return next(
        d for d in of_kind(found, "Deployment") if not d["metadata"]["name"].endswith("redis")
    )


def router_container(found: list[Object]) -> Object:
    spec = deployment(found)["spec"]["template"]["spec"]
    return next(c for c in spec["containers"] if c["name"] == "router")


def config_of(found: list[Object], tmp_path: Path) -> Config:
    """Return the configuration that the router of these objects reads, with its Secrets
    in place.
    """
    text = next(iter(of_kind(found, "ConfigMap")))["data"]["router.yaml"]
    if tokenizer := re.search(r"^tokenizer: (\S+)$", text, re.MULTILINE):
        text = text.replace(tokenizer[1], str(write_model(tmp_path / "tokenizer")))
    for name in set(re.findall(r"/etc/warmroute-(?:keys|tls)/\S+", text)):
        file = tmp_path / name.strip("/").replace("/", "-")
        file.write_text("sha256:" + "0" * 64 + " tenant\n", encoding="utf-8")
        text = text.replace(name, str(file))
    file = tmp_path / "router.yaml"
    file.write_text(text, encoding="utf-8")
    router = router_container(found)
    assert router["command"] == ["warmroute"]
    arguments = [part.replace("/etc/warmroute/router.yaml", str(file)) for part in router["args"]]
    environ = {e["name"]: e["value"] for e in router.get("env", []) if "value" in e}
    if any(e["name"] == "WARMROUTE_STATE" for e in router.get("env", [])):
        environ["WARMROUTE_STATE"] = "redis://:secret@r.example:6380"
    return router_config(arguments, environ)


@each_variant
def test_each_variant_is_valid_for_the_oldest_and_newest_kubernetes(name) -> None:
    found = rendered(name)
    for version in chart.VERSIONS:
        assert [f for one in found for f in schema_errors(one, version)] == []
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, name in names)


def test_the_schemas_refuse_misspelt_fields() -> None:
    for one in objects(merged(VARIANTS["picker, gateway, monitored"], SCALED)):
        for spec in {"spec", "rules", "data"} & one.keys():
            wrong = copy.deepcopy(one)
            if isinstance(wrong[spec], dict) and spec == "spec":
                wrong[spec]["slector"] = {}
            else:
                wrong["spek"] = wrong.pop(spec)
            assert list(schema_errors(wrong, chart.VERSIONS[0])), one["kind"]


@each_variant
def test_the_router_reads_the_charts_configuration(name, tmp_path) -> None:
    values, found = variant_values(name), rendered(name)
    config = config_of(found, tmp_path)
    assert (config.host, config.admin_host) == ("0.0.0.0", "0.0.0.0")
    assert config.admin_open == (not values["keys"]["admin"])
    assert (config.state is None) == (values["redis"]["mode"] == "none")
    assert bool(config.tls.cert) == bool(values["tls"]["client"])
    assert bool(config.tokenizer) == bool(values["tokenizer"]["volume"])
    if "timeouts" in VARIANTS[name].get("config", {}):
        assert config.timeouts.shutdown_s == 300
    if values["mode"] == "picker":
        assert config.picker.host == "0.0.0.0"
        assert (config.picker.port, config.picker.health_port) == (9002, 9003)


# Sections and keys that templates/checks.yaml refuses, because the chart sets them itself.
CHARTS_OWN = re.compile(
    r"(host|port|admin_host|admin_port|hot_restart|picker\.(host|port|health_port))$"
    r"|(admin_tls|picker_tls)\."
)


def test_every_configuration_key_reaches_the_router_unchanged(tmp_path: Path) -> None:
    """Every configuration key reaches the router as given, also numbers of many digits, which
    Helm's templates would write with an exponent.
    """
    given = {path: another_value(path, tmp_path) for path in keys_of(Config)}
    config = nested({path: v for path, v in given.items() if not CHARTS_OWN.match(path)})
    found = objects(merged(SOURCES, {"config": config}))
    (text,) = [one["data"]["router.yaml"] for one in found if one["kind"] == "ConfigMap"]
    read = yaml.safe_load(text)
    for path, value in given.items():
        if not CHARTS_OWN.match(path):
            place = read
            for name in path.split("."):
                place = place[name]
            assert keys_of(Config)[path].read(place) == value, path


@each_variant
def test_the_service_account_may_read_only_what_discovery_reads(name, tmp_path) -> None:
    found = rendered(name)
    wanted: set[tuple[str, str, str]] = set()
    config = config_of(found, tmp_path)
    for source in map(parse_source, config.discovery):
        if isinstance(source, KubernetesSpec):
            wanted.add((source.namespace, "discovery.k8s.io", "endpointslices"))
        elif isinstance(source, InferencePoolSpec):
            wanted.add((source.namespace, "inference.networking.k8s.io", "inferencepools"))
            wanted.add((source.namespace, "", "pods"))
            if config.picker.port >= 0:
                group = "inference.networking.x-k8s.io"
                wanted.add((source.namespace, group, "inferenceobjectives"))
    allowed = set()
    for role in of_kind(found, "Role"):
        for rule in role["rules"]:
            assert rule.keys() == {"apiGroups", "resources", "verbs"}
            assert rule["verbs"] == ["list", "watch"]
            (group,), (resource,) = rule["apiGroups"], rule["resources"]
            allowed.add((role["metadata"]["namespace"], group, resource))
    assert allowed == wanted
    assert not of_kind(found, "ClusterRole")
    spec = deployment(found)["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is bool(wanted)
    (account,) = of_kind(found, "ServiceAccount")
    assert spec["serviceAccountName"] == account["metadata"]["name"]
    for binding in of_kind(found, "RoleBinding"):
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (account["metadata"]["name"], "llm")
        assert binding["roleRef"]["name"] == of_kind(found, "Role")[0]["metadata"]["name"]


def _reachable(policy: Object, direction: str) -> set[int]:
    return {port["port"] for rule in policy["spec"][direction] for port in rule.get("ports", [])}


@each_variant
def test_network_policies_protect_open_ports_and_allow_needed_traffic(name) -> None:
    values, found = variant_values(name), rendered(name)
    policies = of_kind(found, "NetworkPolicy")
    if not values["networkPolicy"]["enabled"]:
        assert not policies
        return
    labels = deployment(found)["spec"]["template"]["metadata"]["labels"]
    (guard,) = [
        p for p in policies if p["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ]
    for rule in guard["spec"]["ingress"]:
        if 8081 in {port["port"] for port in rule["ports"]}:
            (source,) = rule["from"]
            chosen = source["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
            assert chosen == values["monitoring"]["namespace"]
    front = {9002, 9003} if values["mode"] == "picker" else {8080}
    assert front <= _reachable(guard, "ingress")
    assert (8080 in _reachable(guard, "ingress")) == (
        values["mode"] != "picker" or values["picker"]["front"]
    )
    needed = {53, *values["engines"]["httpPorts"], *values["engines"]["eventPorts"]}
    if values["redis"]["mode"] != "none":
        needed.add(6379 if values["redis"]["mode"] == "own" else values["redis"]["port"])
    if of_kind(found, "Role"):
        needed |= {443, 6443}
    if values["networkPolicy"]["extraEgress"]:
        needed.add(4318)
    assert _reachable(guard, "egress") == needed
    (engines,) = [
        r["to"][0] for r in guard["spec"]["egress"] if 5557 in {p["port"] for p in r["ports"]}
    ]
    assert engines["podSelector"]["matchLabels"] == values["engines"]["selector"]
    guarded = {p["spec"]["podSelector"]["matchLabels"]["app"] for p in policies}
    assert guarded == {d["metadata"]["name"] for d in of_kind(found, "Deployment")}


@each_variant
def test_pods_run_with_minimal_rights(name) -> None:
    for one in of_kind(rendered(name), "Deployment"):
        spec = one["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["readOnlyRootFilesystem"] is (container["image"] != "vllm:1")
        assert all("memory" in c["resources"]["limits"] for c in spec["containers"])


@each_variant
def test_ports_probes_services_and_selectors_match(name) -> None:
    values, found = variant_values(name), rendered(name)
    pods = [d["spec"]["template"] for d in of_kind(found, "Deployment")]
    for template in pods:
        for container in template["spec"]["containers"]:
            ports = {p["name"]: p["containerPort"] for p in container["ports"]}
            assert len(ports) == len(container["ports"])
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container.get(kind, {})
                if "httpGet" in probe:
                    assert probe["httpGet"]["port"] in ports
                if "grpc" in probe:
                    assert probe["grpc"]["port"] == ports["grpc-health"]
                    assert probe["grpc"]["service"] == "readiness"
            mounted = {m["name"] for m in container.get("volumeMounts", [])}
            assert mounted <= {v["name"] for v in template["spec"].get("volumes", [])}
    for service in of_kind(found, "Service"):
        chosen = [
            t
            for t in pods
            if service["spec"]["selector"].items() <= t["metadata"]["labels"].items()
        ]
        assert chosen, service["metadata"]["name"]
        names = {p["name"] for t in chosen for c in t["spec"]["containers"] for p in c["ports"]}
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= names
    one = deployment(found)
    assert (
        one["spec"]["selector"]["matchLabels"].items()
        <= one["spec"]["template"]["metadata"]["labels"].items()
    )
    for budget in of_kind(found, "PodDisruptionBudget"):
        assert budget["spec"]["selector"] == one["spec"]["selector"]
    for scaler in of_kind(found, "HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] == one["metadata"]["name"]
        assert "replicas" not in one["spec"], "the deployment would undo what the scaler did"
        told = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
        for metric in scaler["spec"]["metrics"]:
            assert metric["type"] == "Resource" or f"`{metric['pods']['metric']['name']}`" in told
    for monitor in of_kind(found, "ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        (scraped,) = [
            s
            for s in of_kind(found, "Service")
            if labels.items() <= s["metadata"]["labels"].items()
        ]
        assert {p["name"] for p in scraped["spec"]["ports"]} == {"admin"}
    for pool in of_kind(found, "InferencePool"):
        picker = pool["spec"]["endpointPickerRef"]
        (service,) = [
            s for s in of_kind(found, "Service") if s["metadata"]["name"] == picker["name"]
        ]
        assert picker["port"]["number"] in {p["port"] for p in service["spec"]["ports"]}
        assert pool["spec"]["selector"]["matchLabels"] == values["engines"]["selector"]


@each_variant
def test_a_router_has_time_to_drain(name) -> None:
    found = rendered(name)
    router, template = router_container(found), deployment(found)["spec"]["template"]
    (waits_s,) = re.findall(r"sleep\((\d+)\)", str(router["lifecycle"]))
    shutdown_s = VARIANTS[name].get("config", {}).get("timeouts", {}).get("shutdown_s", 30)
    grace_s = template["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > int(waits_s) + 2 * shutdown_s
    probe = router["readinessProbe"]
    assert int(waits_s) > 2 * probe["periodSeconds"] * probe["failureThreshold"]
    for engine in template["spec"]["containers"]:
        if engine["name"] == "engine":
            (engine_waits_s,) = re.findall(r"sleep\((\d+)\)", str(engine["lifecycle"]))
            assert int(waits_s) < int(engine_waits_s) < grace_s


def test_a_changed_configuration_rolls_the_pods() -> None:
    def mark(values: Object) -> str:
        notes = deployment(objects(values))["spec"]["template"]["metadata"]["annotations"]
        return str(notes["checksum/config"])

    assert mark(SOURCES) == mark(merged(SOURCES, {"replicas": 5}))
    assert mark(SOURCES) != mark(merged(SOURCES, {"config": {"policy": "hybrid"}}))


FETCHED = {
    "tokenizer": {"volume": {"emptyDir": {}}},
    "extraInitContainers": [
        {
            "name": "fetch",
            "image": "registry.example/tokenizers:1",
            "command": ["cp", "-r", "/llama/.", "/tokenizer"],
            "volumeMounts": [{"name": "tokenizer", "mountPath": "/tokenizer"}],
        }
    ],
}
# The tokenizer of an engine in the same pod, which has the model anyway.
BESIDE = {
    "mode": "sidecar",
    "config": {"tokenizer": "/models/llama"},
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
}
TOKENIZERS: dict[str, tuple[Object, str]] = {
    "a claim": ({"tokenizer": {"volume": PVC, "folder": "llama/8b"}}, "tokenizer/llama/8b"),
    "a ConfigMap": ({"tokenizer": {"volume": {"configMap": {"name": "t"}}}}, "tokenizer"),
    "an image": ({"tokenizer": {"volume": {"image": {"reference": "t:1"}}}}, "tokenizer"),
    "an init container": (FETCHED, "tokenizer"),
    "the engine's volume": (merged(ENGINE, BESIDE), "models/llama"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_router_reads_the_tokenizer_of_a_volume(name, tmp_path) -> None:
    """The router tokenizes exactly with the tokenizer in a volume, whose folder in the ConfigMap is
    mounted read-only.
    """
    values, place = TOKENIZERS[name]
    found = objects(merged(SOURCES, values))
    assert [f for one in found for f in schema_errors(one, chart.VERSIONS[-1])] == []
    spec = deployment(found)["spec"]["template"]["spec"]
    path = yaml.safe_load(of_kind(found, "ConfigMap")[0]["data"]["router.yaml"])["tokenizer"]
    assert path in (f"/etc/warmroute-{place}", f"/{place}")
    mounts = router_container(found)["volumeMounts"]
    (mount,) = [m for m in mounts if f"{path}/".startswith(f"{m['mountPath']}/")]
    (volume,) = [v for v in spec["volumes"] if v["name"] == mount["name"]]
    assert mount["readOnly"]
    source = values["tokenizer"]["volume"] if "tokenizer" in values else PVC
    assert volume == {"name": mount["name"], **source}
    encoders = encoders_of(tokenizer_terms(config_of(found, tmp_path)))
    encoder = encoders and encoders.of(None)
    assert encoder is not None
    exact = tokenizers.Tokenizer.from_str(tokenizer_text("bytes")).encode("as it is").ids
    assert encoder.encode("as it is").tolist() == exact


def test_the_charts_dashboards_and_rules_equal_the_files_in_grafana() -> None:
    found = objects(merged(SOURCES, ALL_MONITORING))
    boards = [
        c for c in of_kind(found, "ConfigMap") if "grafana_dashboard" in c["metadata"]["labels"]
    ]
    shown = {name: json.loads(text) for c in boards for name, text in c["data"].items()}
    assert shown == {p.name: json.loads(p.read_text()) for p in (ROOT / "grafana").glob("*.json")}
    assert all(len(json.dumps(board)) < 1_000_000 for board in boards), "too large for a ConfigMap"
    rules = [rule["spec"] for rule in of_kind(found, "PrometheusRule")]
    files = [ROOT / "grafana" / "prometheus" / f"{name}.yml" for name in ("recording", "alerts")]
    assert rules == [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]


BAD: list[tuple[Object, str]] = [
    ({"mode": "both"}, "mode"),
    ({"replicas": 0}, "replicas"),
    ({"replicas": "two"}, "replicas"),
    ({"replcas": 2}, "replcas"),
    ({"image": {"tag": ""}}, "tag"),
    ({"discovery": {"services": ["llm/vllm"]}}, "services"),
    ({"discovery": {"sources": ["kubernetes:llm/vllm"]}}, "sources"),
    ({"discovery": {"sources": ["consul:x"]}}, "sources"),
    ({"discovery": {"options": "kind"}}, "options"),
    ({"engines": {"httpPorts": []}}, "httpPorts"),
    ({"engines": {"httpPorts": [80_000]}}, "httpPorts"),
    ({"engines": {"httpPorts": list(range(1, 10))}}, "httpPorts"),
    ({"engines": {"eventPorts": [5557, 5557]}}, "eventPorts"),
    ({"redis": {"mode": "maybe"}}, "redis"),
    ({"redis": {"mode": "given", "url": "redis://:password@r:6379"}}, "url"),
    ({"keys": {"admin": "Not A Name"}}, "admin"),
    ({"service": {"type": "ExternalName"}}, "type"),
    ({"sidecar": {"engine": {"container": {"image": "x", "name": "y"}}}}, "name"),
    ({"picker": {"failureMode": "Open"}}, "failureMode"),
    ({"picker": {"httpRoute": {"requestTimeout": "5 minutes"}}}, "requestTimeout"),
    ({"preStopSeconds": 1}, "preStopSeconds"),
    ({"podDisruptionBudget": {"maxUnavailable": 0}}, "maxUnavailable"),
    ({"autoscaling": {"inflightRequests": -1}}, "inflightRequests"),
    ({"monitoring": {"serviceMonitor": {"interval": "often"}}}, "interval"),
    ({"config": []}, "config"),
    ({"config": {"polcy": "hybrid"}}, "'polcy' not allowed"),
    ({"config": {"ramp_s": 5}}, "'ramp_s' not allowed"),
    ({"config": {"hold_s": 5}}, "'hold_s' not allowed"),
    (
        {"config": {"limits": {"hold": 5}}},
        "/config/limits': additional properties 'hold' not allowed",
    ),
    ({"config": {"limits": {"hold_s": "5"}}}, "hold_s': got string, want number"),
    ({"config": {"limits": {"hold_s": 5_000}}}, "hold_s': maximum"),
    ({"config": {"limits": {"sessions": 300.5}}}, "sessions': got number, want integer"),
    ({"config": {"limits": []}}, "limits': got array, want object"),
    ({"config": {"timeouts": None}}, "timeouts': got null, want object"),
    ({"config": {"explain": "yes"}}, "explain': got string, want boolean"),
    ({"config": {"disaggregation": "sometimes"}}, "disaggregation': value must be one of"),
    ({"config": {"trusted_peers": "10.0.0.0/8"}}, "trusted_peers': got string, want array"),
    ({"config": {"tracing": {"sample": 0.5, "endpont": "http://t:4318"}}}, "'endpont' not allowed"),
    (
        {"config": {"workers": [{"url": "http://e:8000", "max_requets": 3}]}},
        "'max_requets' not allowed",
    ),
    ({"config": {"workers": [{"url": "http://e:8000", "weight": "fast"}]}}, "weight': got string"),
    ({"config": {"workers": [{"kind": "vllm"}]}}, "missing property 'url'"),
    ({"config": {"workers": ["http://e:8000,max_requets=3"]}}, "does not match pattern"),
    ({"discovery": {"options": "knd=vllm"}}, "options"),
    ({"discovery": {"options": "kind=vllm,rank=1"}}, "options"),
    ({"tokenizer": {"volume": {"name": "x", "emptyDir": {}}}}, "volume"),
    ({"tokenizer": {"volume": PVC | {"emptyDir": {}}}}, "volume"),
    ({"tokenizer": {"volume": PVC, "folder": "../other"}}, "folder"),
    ({"tokenizer": {"volume": PVC, "folder": "/models"}}, "folder"),
    ({"extraVolumes": [{"emptyDir": {}}]}, "extraVolumes"),
    ({"extraVolumeMounts": [{"name": "x", "mountPath": "models"}]}, "mountPath"),
    ({"extraVolumeMounts": [{"name": "x", "mountPath": "/tmp"}]}, "mountPath"),
    ({"extraInitContainers": [{"name": "x"}]}, "image"),
    # Rules that involve several keys.
    ({"mode": "central"}, "no source of engines is set"),
    (merged(SOURCES, {"networkPolicy": {"enabled": False}}), "whoever reaches the admin port"),
    (merged(SOURCES, {"redis": {"mode": "given"}}), "where it is, is said by redis.url"),
    (merged(SOURCES, SECRET, {"redis": {"url": "redis://r:1"}}), "are both given"),
    (merged(SOURCES, {"redis": {"mode": "given", "secret": {"name": "x"}}}), "redis.secret.key"),
    (merged(SOURCES, BY_CPU, {"autoscaling": {"cpuPercent": 0}}), "by what?"),
    (merged(SOURCES, SCALED, {"autoscaling": {"maxReplicas": 2}}), "above autoscaling.maxReplicas"),
    ({"mode": "picker", "picker": {"httpRoute": {"create": True}}}, "names the gateway"),
    ({"mode": "picker", "discovery": {"namespace": "other"}}, "in its own namespace"),
    ({"mode": "sidecar", "engines": {"selector": {"app": "x"}}}, "label app is the chart's own"),
    ({"mode": "picker", "config": {"picker": {"port": 1}}}, "config.picker.port is the chart's"),
    (merged(SOURCES, {"config": {"admin_port": 1}}), "config.admin_port: probes"),
    (merged(SOURCES, {"tokenizer": {"folder": "llama"}}), "tokenizer.volume, which is not given"),
    (
        merged(SOURCES, {"tokenizer": {"volume": PVC}, "config": {"tokenizer": "/models"}}),
        "has one tokenizer",
    ),
    (merged(SOURCES, {"extraVolumes": [{"name": "tmp"}]}), "the name tmp is taken"),
    (
        merged(SOURCES, {"extraVolumeMounts": [{"name": "models", "mountPath": "/models"}]}),
        "no volume has the name models",
    ),
    (
        merged(SOURCES, {"keys": {"admin": "k"}}, ALL_MONITORING),
        "Prometheus needs a key, too",
    ),
]


@pytest.mark.parametrize(("values", "says"), BAD, ids=[says[:30] for _, says in BAD])
def test_invalid_values_are_refused_with_the_reason(values: Object, says: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(says)):
        rendered_texts(values)


def test_the_schema_has_the_same_keys_as_the_values_file() -> None:
    def keys(schema: Any, values: Any, place: str = "") -> list[str]:
        if not isinstance(values, dict) or "properties" not in schema or place == ".config":
            return []
        named, given = set(schema["properties"]) - {"global"}, set(values)
        wrong = (
            [f"{place}.{key}" for key in named ^ given]
            if place != ".sidecar.engine.container"
            else []
        )
        return wrong + [
            w
            for key in named & given
            for w in keys(schema["properties"][key], values[key], f"{place}.{key}")
        ]

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert keys(schema, yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))) == []


def test_the_package_renders_like_the_folder(tmp_path) -> None:
    """The packaged chart renders like its folder, and Helm lints it without a message, also for the
    oldest supported Kubernetes.
    """
    report = helm_python.lint(CHART, SOURCES, strict=True, kube_version="v1.28.0")
    assert report["errors"] == []
    older = tmp_path / "warmroute-0.0.1.tgz"
    older.touch()
    archive = release.chart.package(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [archive.name]
    assert archive.stat().st_size < release.chart.MAX_BYTES
    with tarfile.open(archive) as packed:
        assert all(member.isfile() for member in packed.getmembers())
        names = {member.name.partition("/")[2] for member in packed.getmembers()}
    assert names == {p.relative_to(CHART).as_posix() for p in CHART.rglob("*") if p.is_file()}
    with helm_python.Chart.load(archive) as again:
        values = merged(SOURCES, ALL_MONITORING)
        assert again.render(values, name="warmroute", namespace="llm") == chart._loaded().render(
            values, name="warmroute", namespace="llm"
        )


def test_a_chart_with_a_symlink_or_an_error_is_not_packaged(tmp_path) -> None:
    copy_ = shutil.copytree(CHART, tmp_path / "warmroute")
    (copy_ / "rules" / "more.yml").symlink_to(copy_ / "values.yaml")
    with pytest.raises(release.chart.ChartError, match=r"rules/more\.yml is a link"):
        release.chart.package(tmp_path / "dist", copy_)
    (copy_ / "rules" / "more.yml").unlink()
    (copy_ / "Chart.yaml").write_text("apiVersion: v2\nname: warmroute\nversion: one\n")
    with pytest.raises(release.chart.ChartError, match="version"):
        release.chart.package(tmp_path / "dist", copy_)


def test_the_chart_has_the_projects_version() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {about["version"], about["appVersion"]} == {project["version"]}


@pytest.mark.parametrize("name", chart.SAMPLES)
def test_the_plain_manifests_are_rendered_from_the_chart(name) -> None:
    file = chart.PLAIN / f"{name}.yaml"
    assert file.read_text(encoding="utf-8") == chart.plain_manifest(name), (
        "python -m tests.deploy.chart"
    )


@pytest.mark.parametrize("mode", _MODES)
def test_the_notes_say_what_to_do_next(mode) -> None:
    notes = rendered_texts(merged({"mode": mode}, SOURCES, {"redis": {"mode": "none"}}))[
        "NOTES.txt"
    ]
    assert "port-forward deployment/warmroute-" in notes
    assert "WARNING: 2 routers and no Redis" in notes
    assert "relies on network policies" in notes
    assert "Without tokenizer.volume text is matched approximately" in notes
    exact = rendered_texts(merged({"mode": mode}, SOURCES, {"tokenizer": {"volume": PVC}}))[
        "NOTES.txt"
    ]
    assert "approximately" not in exact


NAMED: dict[str, tuple[Object, str]] = {
    "unknown": (SOURCES, "MODEL"),
    "an option": (merged(SERVICE, {"discovery": {"options": "kind=vllm,model=a/b"}}), "a/b"),
    "timed": ({"mode": "sidecar"}, "warmroute-timed"),
    "a flag": (
        merged(
            {"mode": "sidecar"},
            {"sidecar": {"engine": {"container": {"args": ["--served-model-name", "chat"]}}}},
        ),
        "chat",
    ),
    "not told": (merged({"mode": "sidecar"}, ENGINE), "MODEL"),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_first_request_of_the_notes_has_the_model(name) -> None:
    values, model = NAMED[name]
    (request,) = first_requests(values)
    assert request.body["model"] == model
    assert request.url == "http://127.0.0.1:8080/v1/chat/completions"


def test_the_first_request_fits_keys_tls_and_gateways() -> None:
    notes = rendered_texts(merged(SOURCES, KEYS, PODS))["NOTES.txt"]
    (request,) = first_requests(merged(SOURCES, KEYS, PODS))
    assert request.url.startswith("https://127.0.0.1:8080/")
    assert request.headers["Authorization"] == "Bearer KEY"
    assert "curl -s -k -H 'Authorization: Bearer KEY' https://127.0.0.1:8080/v1/models" in notes
    values = merged({"mode": "picker"}, GATEWAY)
    (request,) = first_requests(values)
    assert request.url == "http://$GATEWAY/v1/chat/completions"
    assert request.headers["Host"] == "llm.example.com"
    assert (
        "GATEWAY=$(kubectl -n gateways get gateway inference -o"
        in rendered_texts(values)["NOTES.txt"]
    )


def test_object_names_begin_with_the_release_name_and_stay_short() -> None:
    for called in ("a", "warmroute", "a-very-long-name-of-a-release-that-helm-allows-so"):
        found = objects(merged(SOURCES, ALL_MONITORING), name=called)
        assert all(len(one["metadata"]["name"]) <= 63 for one in found)
    names = [one["metadata"]["name"] for one in objects(merged(SOURCES, {"fullnameOverride": "x"}))]
    assert all(name.startswith("x-") for name in names)
