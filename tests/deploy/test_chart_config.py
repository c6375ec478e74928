"""`config` of the chart's values: each key of the router and no other, by Helm's own look at it."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from router.config.keys import keys_of
from tests.deploy import chart
from tests.deploy.chart import RefusedError, merged, objects, texts
from tests.router.config_values import another_value

ROOT = Path(__file__).parents[2]
SOURCES = {"discovery": {"sources": ["dns:engines:8000"]}}
SCHEMA = json.loads(chart.SCHEMA.read_text(encoding="utf-8"))["properties"]["config"]
CHECK = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)
# What templates/checks.yaml keeps for the chart, by whole sections and keys.
CHARTS_OWN = re.compile(
    r"(host|port|admin_host|admin_port|hot_restart|picker\.(host|port|health_port))$"
    r"|(admin_tls|picker_tls)\."
)


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Values by path as a configuration file has them, lists and not tuples."""
    whole: dict[str, Any] = {}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        place = whole.setdefault(section, {}) if section else whole
        place[name] = list(value) if isinstance(value, tuple) else value
    return whole


def test_the_schema_is_that_of_the_routers_keys() -> None:
    text = chart.SCHEMA.read_text(encoding="utf-8")
    assert text == chart.schema_of_values(), "run: python -m tests.deploy.chart"


def test_every_key_reaches_the_router_as_it_was_given(tmp_path: Path) -> None:
    """Also numbers of many digits, which Helm's templates would write with an exponent."""
    given = {path: another_value(path, tmp_path) for path in keys_of()}
    CHECK.validate(nested(given))
    config = nested({path: v for path, v in given.items() if not CHARTS_OWN.match(path)})
    found = objects(merged(SOURCES, {"config": config}))
    (text,) = [one["data"]["router.yaml"] for one in found if one["kind"] == "ConfigMap"]
    read = yaml.safe_load(text)
    for path, value in given.items():
        if not CHARTS_OWN.match(path):
            place = read
            for name in path.split("."):
                place = place[name]
            assert keys_of()[path].read(place) == value, path


def test_no_key_is_taken_by_another_name_or_in_another_type() -> None:
    for path, key in keys_of().items():
        assert not CHECK.is_valid(nested({f"{path}x": key.default})), path
        wrong: list[Any] = [{"a": 1}, [[]]]
        if isinstance(key.default, int | float):
            wrong.append("yes" if isinstance(key.default, bool) else str(key.default))
        elif key.path == "chat_template_kwargs":  # JSON, or what it says
            wrong = [1, []]
        for value in wrong:
            assert not CHECK.is_valid(nested({path: value})), (path, value)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"polcy": "hybrid"}, "'polcy' not allowed"),
    ({"ramp_s": 5}, "'ramp_s' not allowed"),
    ({"hold_s": 5}, "'hold_s' not allowed"),
    ({"limits": {"hold": 5}}, "/config/limits': additional properties 'hold' not allowed"),
    ({"limits": {"hold_s": "5"}}, "hold_s': got string, want number"),
    ({"limits": {"hold_s": 5_000}}, "hold_s': maximum"),
    ({"limits": {"sessions": 300.5}}, "sessions': got number, want integer"),
    ({"limits": []}, "limits': got array, want object"),
    ({"timeouts": None}, "timeouts': got null, want object"),
    ({"explain": "yes"}, "explain': got string, want boolean"),
    ({"disaggregation": "sometimes"}, "disaggregation': value must be one of"),
    ({"trusted_peers": "10.0.0.0/8"}, "trusted_peers': got string, want array"),
    ({"tracing": {"sample": 0.5, "endpont": "http://t:4318"}}, "'endpont' not allowed"),
    ({"workers": [{"url": "http://e:8000", "max_requets": 3}]}, "'max_requets' not allowed"),
    ({"workers": [{"url": "http://e:8000", "weight": "fast"}]}, "weight': got string"),
    ({"workers": [{"kind": "vllm"}]}, "missing property 'url'"),
    ({"workers": ["http://e:8000,max_requets=3"]}, "does not match pattern"),
]


@pytest.mark.parametrize(("config", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_helm_names_a_mistake(config: dict[str, Any], says: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(says)):
        texts(merged(SOURCES, {"config": config}))


def test_helm_names_an_option_of_discovery_that_nobody_reads() -> None:
    for options in ("knd=vllm", "kind=vllm,rank=1"):
        with pytest.raises(RefusedError, match="/discovery/options"):
            texts(merged(SOURCES, {"discovery": {"options": options}}))


def test_examples_of_the_documents_are_taken() -> None:
    known = SCHEMA["properties"].keys()
    taken = []
    pages = {*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "kubernetes.md"}  # whose are values
    for page in sorted(pages):
        for text in re.findall(r"(?ms)^```yaml\n(.*?)^```", page.read_text(encoding="utf-8")):
            example = yaml.safe_load(text)
            if isinstance(example, dict) and example.keys() <= known:
                CHECK.validate(copy.deepcopy(example))
                taken.append(page.name)
    assert {"configuration.md", "replicas.md", "triton.md", "discovery.md"} <= {*taken}
