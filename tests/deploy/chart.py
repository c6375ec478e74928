"""Renders the Helm chart with Helm itself; as a program, writes the plain Kubernetes files made
from it.

python -m tests.deploy.chart writes docs/deploy/kubernetes/{central,sidecar,picker}.yaml
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import yaml

from tests.deploy.parsed import DEPLOY

CHART = DEPLOY / "helm" / "warmroute"
PLAIN = DEPLOY / "kubernetes"
RELEASE, NAMESPACE = "warmroute", "llm"
VERSIONS = ("1.28", kubernetes_validate.latest_version())
CUSTOM = json.loads((Path(__file__).parent / "custom_kinds.json").read_text(encoding="utf-8"))
# The plain files of docs/deploy/kubernetes, and the values that they are made with.
SAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "central": (
        "Two routers in front of all engines (engines.yaml), which share what they know by Redis.",
        {"discovery": {"sources": ["dns:warmroute-engines:8000"]}},
    ),
    "sidecar": (
        "A router beside each engine, in its pod: no hop more, and as many routers as engines.\n"
        "# Each of them knows all engines, by DNS, and what the other routers do, by Redis.",
        {"mode": "sidecar"},
    ),
    "picker": (
        "Two endpoint pickers for a gateway, which carries the requests itself, and the\n"
        "# InferencePool of all engines (engines.yaml). A route to that pool is yours to add.",
        {"mode": "picker"},
    ),
}

Object = dict[str, Any]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in a fraction of the time
# The library would read its schemas again for each object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


class RefusedError(Exception):
    """Raised if Helm does not accept the values; the text says why."""


def merged(*parts: Object) -> Object:
    """Return the values of all parts merged, later ones over earlier ones, as Helm does it."""
    whole: Object = {}
    for part in parts:
        for key, value in copy.deepcopy(part).items():
            both = isinstance(value, dict) and isinstance(whole.get(key), dict)
            whole[key] = merged(whole[key], value) if both else value
    return whole


@cache
def _loaded() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def rendered_texts(
    values: Object, name: str = RELEASE, namespace: str = NAMESPACE
) -> dict[str, str]:
    """Return each template's rendered text by its file. Raises RefusedError if Helm refuses the
    values.
    """
    try:
        _loaded().validate_schema(values)
        rendered = _loaded().render(values, name=name, namespace=namespace)
    except helm_python.HelmError as error:
        raise RefusedError(str(error)) from error
    return {path.rpartition("/")[2]: text for path, text in sorted(rendered.items())}


def objects(values: Object, name: str = RELEASE, namespace: str = NAMESPACE) -> list[Object]:
    """Return the Kubernetes objects that the chart creates. Raises RefusedError if Helm refuses the
    values.
    """
    files = rendered_texts(values, name, namespace).items()
    found = (yaml.load_all(text, _LOADER) for file, text in files if file.endswith(".yaml"))
    return [one for documents in found for one in documents if one]


@dataclass(frozen=True)
class Request:
    """A request that a command in the chart's notes sends."""

    url: str
    headers: dict[str, str]
    body: Object


def first_requests(values: Object) -> list[Request]:
    """Return the requests with a body in the chart's notes, as `curl` would send them."""
    found = []
    notes = rendered_texts(values)["NOTES.txt"].replace("\\\n", " ")
    for line in re.findall(r"^  (curl .* -d .*)$", notes, re.MULTILINE):
        words = shlex.split(line)
        pairs = list(itertools.pairwise(words))
        headers = dict(value.split(": ", 1) for flag, value in pairs if flag == "-H")
        (body,) = [json.loads(value) for flag, value in pairs if flag == "-d"]
        (url,) = [word for word in words if re.match("https?://", word)]
        found.append(Request(url, headers, body))
    return found


def schema_errors(one: Object, version: str) -> tuple[str, ...]:
    """Return the errors of an object by the schema of its kind."""
    return _faults(json.dumps(one, sort_keys=True), version)


@cache
def _custom(kind: str) -> Any:
    checks = jsonschema.validators.validator_for(CUSTOM[kind])
    checks.check_schema(CUSTOM[kind])
    return checks(CUSTOM[kind])


@cache
def _faults(text: str, version: str) -> tuple[str, ...]:
    one = json.loads(text)
    kind = f"{one['kind']} {one['apiVersion']}"
    try:
        if kind in CUSTOM:
            _custom(kind).validate(one)
        else:
            kubernetes_validate.validate(one, version, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        return (f"{one['kind']} {one['metadata']['name']}: {error}",)
    return ()


def plain_manifest(name: str) -> str:
    """Return the text of a plain file in docs/deploy/kubernetes, for users without Helm."""
    about, values = SAMPLES[name]
    parts = [text for file, text in rendered_texts(values).items() if file.endswith(".yaml")]
    documents = [d.strip("\n") for text in parts for d in text.split("\n---\n") if d.strip()]
    given = "".join(f" \\\n#     --set-json '{k}={json.dumps(v)}'" for k, v in values.items())
    command = f"helm template {RELEASE} docs/deploy/helm/warmroute -n {NAMESPACE}{given}"
    usage = f"kubectl apply -n {NAMESPACE} -f docs/deploy/kubernetes/{name}.yaml"
    head = f"# {about}\n#   {usage}\n# Made of the chart:\n#   {command}\n"
    return head + "\n---\n".join(documents) + "\n"


if __name__ == "__main__":
    for which in SAMPLES:
        (PLAIN / f"{which}.yaml").write_text(plain_manifest(which), encoding="utf-8")
