"""Tests of docs/deploy/kubernetes, which is made from the chart: its references resolve, and it
works.
"""

from __future__ import annotations

import asyncio
import re
import sys
from urllib.parse import urlsplit

import pytest
import yaml

from engine.cli.main import parser
from router.settings.schema import Config
from tests.deploy.chart import VERSIONS, first_requests, schema_errors
from tests.deploy.parsed import DEPLOY, ENGINE_PATHS, ROUTER_PATHS, engine_ports, router_config
from tests.live.stack import running
from tests.told_decision import decision_in

FOLDER = DEPLOY / "kubernetes"
FILES = {
    path.stem: list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for path in sorted(FOLDER.glob("*.yaml"))
}
SETS = {  # files that are applied together
    "central": [*FILES["engines"], *FILES["central"]],
    "sidecar": FILES["sidecar"],
}
each_set = pytest.mark.parametrize("name", SETS)


def of_kind(name: str, kind: str):
    return [found for found in SETS[name] if found["kind"] == kind]


def templates(name: str):
    return [found["spec"]["template"] for found in of_kind(name, "Deployment")]


def containers(name: str, which: str):
    return [
        container
        for template in templates(name)
        for container in template["spec"]["containers"]
        if container["name"] == which
    ]


def matching(name: str, labels: dict[str, str]):
    return [t for t in templates(name) if labels.items() <= t["metadata"]["labels"].items()]


def config_text(name: str) -> str:
    (found,) = of_kind(name, "ConfigMap")
    return found["data"]["router.yaml"]


@pytest.fixture
def config(request, tmp_path) -> Config:
    """Return the configuration that the router's container reads by its arguments."""
    (router,) = containers(request.getfixturevalue("name"), "router")
    file = tmp_path / "router.yaml"
    file.write_text(config_text(request.getfixturevalue("name")), encoding="utf-8")
    (mount,) = [m["mountPath"] for m in router["volumeMounts"] if m["name"] == "config"]
    assert router["command"] == ["warmroute"]
    arguments = [part.replace(f"{mount}/router.yaml", str(file)) for part in router["args"]]
    assert str(file) in arguments
    return router_config(arguments, {})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES)
def test_each_object_is_valid(file, version) -> None:
    assert [fault for found in FILES[file] for fault in schema_errors(found, version)] == []


@each_set
def test_the_routers_addresses_of_engines_and_redis_exist(name, config) -> None:
    services = {found["metadata"]["name"]: found["spec"] for found in of_kind(name, "Service")}
    (source,) = config.discovery
    found = re.fullmatch(r"dns:([\w-]+):(\d+).*", str(source))
    assert found is not None
    engines = services[found[1]]
    assert engines["clusterIP"] == "None", "one address for all would hide the engines"
    assert engines["publishNotReadyAddresses"], "a pod that waits for its router is not ready"
    assert matching(name, engines["selector"])
    for engine in containers(name, "engine"):
        assert engine_ports(engine["args"])["http"] == int(found[2])
    state = urlsplit(config.state)
    (redis,) = services[state.hostname]["ports"]
    assert redis["port"] == state.port


@each_set
def test_ports_equal_those_of_the_programs(name, config) -> None:
    (router,) = containers(name, "router")
    ports = {port["name"]: port["containerPort"] for port in router["ports"]}
    assert ports == {"http": config.port, "admin": config.admin_port}
    assert config.host == config.admin_host == "0.0.0.0"
    (template,) = matching(name, {"warmroute.io/router": "true"})
    scraped = template["metadata"]["annotations"]
    assert scraped["warmroute.io/router-port"] == str(config.admin_port)
    for engine in containers(name, "engine"):
        assert {p["containerPort"] for p in engine["ports"]} == set(
            engine_ports(engine["args"]).values()
        )
    for template in matching(name, {"warmroute.io/engine": "true"}):
        assert template["metadata"]["annotations"]["warmroute.io/engine-port"] == "8000"


@each_set
def test_probes_and_services_use_ports_that_exist(name) -> None:
    for template in templates(name):
        for container in template["spec"]["containers"]:
            ports = {port["name"] for port in container["ports"]}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                asks = container.get(kind, {}).get("httpGet")
                if asks is not None:
                    assert asks["port"] in ports
                    paths = ROUTER_PATHS if container["name"] == "router" else ENGINE_PATHS
                    assert asks["path"] in paths
    for service in of_kind(name, "Service"):
        pods = matching(name, service["spec"]["selector"])
        assert pods, service["metadata"]["name"]
        there = {p["name"] for t in pods for c in t["spec"]["containers"] for p in c["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= there


@each_set
def test_selectors_match_pods_that_exist(name) -> None:
    for found in SETS[name]:
        spec = found.get("spec", {})
        chosen = spec.get("selector") or spec.get("podSelector")
        labels = chosen and chosen.get("matchLabels", chosen)
        if labels:
            assert matching(name, labels), (found["kind"], labels)
    (router,) = matching(name, {"warmroute.io/router": "true"})
    budgets = [b["spec"] for b in of_kind(name, "PodDisruptionBudget")]
    assert [b["maxUnavailable"] for b in budgets] == [1]
    assert budgets[0]["selector"]["matchLabels"].items() <= router["metadata"]["labels"].items()


@each_set
def test_network_policies_allow_needed_traffic_and_protect_the_admin_port(name, config) -> None:
    """Network policies allow what is needed and protect the admin port: the setting `admin_open`
    says that a network policy protects the port, so there must be one.
    """
    assert config.admin_open
    policies = {
        found["metadata"]["name"]: found["spec"] for found in of_kind(name, "NetworkPolicy")
    }
    guard = policies[of_kind(name, "ConfigMap")[0]["metadata"]["name"]]
    for rule in guard["ingress"]:
        if config.admin_port in {port["port"] for port in rule["ports"]}:
            (source,) = rule["from"]
            assert set(source) == {"namespaceSelector"}
    leaves = {port["port"] for rule in guard["egress"] for port in rule["ports"]}
    needed = {53, urlsplit(config.state).port}
    needed |= {p for e in containers(name, "engine") for p in engine_ports(e["args"]).values()}
    assert needed <= leaves
    guarded = [t for spec in policies.values() for t in matching(name, labels_of(spec))]
    assert all(template in guarded for template in templates(name)), "a pod that all can reach"


def labels_of(spec) -> dict[str, str]:
    labels: dict[str, str] = spec["podSelector"]["matchLabels"]
    return labels


@each_set
def test_pods_run_with_minimal_rights(name) -> None:
    for template in templates(name):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"]
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


@each_set
def test_a_router_has_time_to_drain(name, config) -> None:
    (router,) = containers(name, "router")
    (template,) = matching(name, {"warmroute.io/router": "true"})
    (waits_s,) = re.findall(r"sleep\((\d+)\)", str(router["lifecycle"]))
    needed_s = int(waits_s) + 2 * config.timeouts.shutdown_s
    assert template["spec"]["terminationGracePeriodSeconds"] > needed_s
    probe = router["readinessProbe"]
    assert int(waits_s) > 2 * probe["periodSeconds"] * probe["failureThreshold"]


async def test_probes_and_pre_stop_work_on_a_real_router(tmp_path) -> None:
    """Probes and preStop work on a real router: it is alive and ready, and after the preStop
    command alive and not ready.
    """
    (router,) = containers("central", "router")
    async with running(tmp_path, workers=1) as stack:

        async def asked(kind: str) -> int:
            asks = router[kind]["httpGet"]
            async with stack.http.get(ports[asks["port"]] + asks["path"]) as reply:
                return reply.status

        ports = {"http": stack.url, "admin": stack.admin}
        probes = ("startupProbe", "readinessProbe", "livenessProbe")
        assert [await asked(kind) for kind in probes] == [200, 200, 200]
        command = router["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:2] == ["python", "-c"]
        told = command[2].replace("http://127.0.0.1:8081", stack.admin)
        told = re.sub(r"sleep\(\d+\)", "sleep(0)", told)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", told)
        assert await process.wait() == 0
        assert [await asked(kind) for kind in probes] == [200, 503, 200]


async def test_the_first_request_of_the_notes_is_routed(tmp_path) -> None:
    """The first request of the chart's notes, for the chart's own simulated engines, goes to a real
    router with one engine and is answered.
    """
    (timed,) = containers("sidecar", "engine")
    (request,) = first_requests({"mode": "sidecar"})
    assert request.body["model"] == parser().parse_args(timed["args"]).model_name
    async with running(tmp_path, 1, **{"model-name": request.body["model"]}) as stack:
        url = request.url.replace("http://127.0.0.1:8080", stack.url)
        async with stack.http.post(url, json=request.body, headers=request.headers) as reply:
            assert reply.status == 200, await reply.text()
            told = reply.headers["x-warmroute-worker"]
            assert decision_in(reply.headers["x-warmroute-explain"])["worker"] == int(told)
        assert told in {str(row["id"]) for row in await stack.rows()}
