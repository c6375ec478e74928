"""Tests that docs/deploy/compose.yaml is valid and that the files and flags in it exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml

from tests.deploy.parsed import DEPLOY, engine_ports, router_config
from tests.grafana.monitoring import promtool, run

FILE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads(Path(__file__).with_name("compose_schema.json").read_text(encoding="utf-8"))
SERVICES = FILE["services"]
ROUTERS = {name: service for name, service in SERVICES.items() if name.startswith("router-")}
ENGINES = {name: service for name, service in SERVICES.items() if name.startswith("engine-")}


def targets(name: str) -> set[str]:
    groups = yaml.safe_load((DEPLOY / "compose" / "targets" / name).read_text(encoding="utf-8"))
    return {target for group in groups for target in group["targets"]}


def test_the_compose_file_is_valid() -> None:
    jsonschema.validate(FILE, SCHEMA)


@pytest.mark.parametrize(
    "wrong", [{"comand": "x"}, {"ports": ["a:b"]}, {"depends_on": {"redis": {"condition": "up"}}}]
)
def test_the_schema_refuses_invalid_services(wrong) -> None:
    service = FILE["services"]["router-1"] | wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(FILE | {"services": {"router-1": service}}, SCHEMA)


def test_routers_know_all_engines_and_share_state() -> None:
    assert len(ROUTERS) == 2
    for router in ROUTERS.values():
        config = router_config(router["command"], router["environment"])
        assert {urlsplit(url).hostname for url in config.workers} == set(ENGINES)
        assert {urlsplit(url).port for url in config.workers} == {8000}
        assert urlsplit(config.state).hostname in SERVICES
        assert (config.host, config.admin_host, config.admin_open) == ("0.0.0.0", "0.0.0.0", True)
        assert set(config.admin_allowed_hosts) == set(ROUTERS), "Prometheus asks by these"
        assert {port.rsplit(":", 1)[1] for port in router["ports"]} == {
            str(config.port),
            str(config.admin_port),
        }
        grace_s = int(router["stop_grace_period"].removesuffix("s"))
        assert grace_s > 2 * config.timeouts.shutdown_s


def test_engines_listen_at_the_ports_that_routers_use() -> None:
    for engine in ENGINES.values():
        assert engine["entrypoint"] == ["warmroute-engine"]
        ports = engine_ports(engine["command"])
        assert ports["http"] == 8000
        assert 0 not in ports.values(), "a port that nobody knows"


def test_ports_are_published_only_on_loopback_and_once() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert len({port.rsplit(":", 1)[0] for port in published}) == len(published)


def test_every_dependency_has_a_health_check() -> None:
    for service in SERVICES.values():
        for other in service.get("depends_on", {}):
            assert "healthcheck" in SERVICES[other]


def test_health_checks_use_ports_and_paths_that_are_served() -> None:
    for services, port in ((ROUTERS, 8080), (ENGINES, 8000)):
        for service in services.values():
            (asked,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", str(service["healthcheck"]))
            assert asked == (str(port), "/health")


def test_mounted_files_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
                assert volume.endswith(":ro"), source
            else:
                assert source in FILE["volumes"]


def test_prometheus_scrapes_all_routers_and_engines(tmp_path) -> None:
    assert targets("routers.yml") == {f"{name}:8081" for name in ROUTERS}
    assert targets("engines.yml") == {f"{name}:8000" for name in ENGINES}
    mounted = dict(volume.split(":")[:2] for volume in SERVICES["prometheus"]["volumes"])
    for source, target in mounted.items():
        if source.startswith("."):
            place = tmp_path / Path(target).relative_to("/etc/prometheus")
            place.symlink_to((DEPLOY / source).resolve())
    checked = run([promtool(), "check", "config", str(tmp_path / "prometheus.yml")])
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert (tmp_path / "targets" / "routers.yml").is_file()


def test_grafana_finds_prometheus_all_dashboards_and_the_runbook() -> None:
    mounted = {
        volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES["grafana"]["volumes"]
    }
    (source,) = yaml.safe_load((DEPLOY / "compose" / "datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((DEPLOY / "compose" / "dashboards.yml").read_text())["providers"]
    folder = provider["options"]["path"]
    files = sorted(path.name for path in (DEPLOY.parents[1] / "grafana").glob("*.json"))
    assert sorted(Path(t).name for t in mounted if t.startswith(folder)) == files
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/slo.json"
    for file in files:
        variables = json.loads((DEPLOY.parents[1] / "grafana" / file).read_text())["templating"]
        (runbook,) = [v["query"] for v in variables["list"] if v["name"] == "runbook"]
        assert f"/usr/share/grafana{runbook}" in mounted
