"""Makes a JSON schema of the router's configuration; as a program, writes it into the chart's
schema.

    python -m tests.deploy.config_schema

The program replaces `config` and `discovery.options` in values.schema.json.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from grafana.make_dashboards import pretty
from router.config.keys import keys_of
from router.discovery.source import _OF_ONE
from router.engines.spec import KEYS, WorkerSpec
from router.settings.schema import Config
from tests.deploy.parsed import DEPLOY

FILE = DEPLOY / "helm" / "warmroute" / "values.schema.json"
Schema = dict[str, Any]
_UNTOLD = ("title", "default")


def config_schema() -> Schema:
    """Return a schema with every key of the router, its type and range, and no other key at any
    depth.

    The router itself checks rules between keys and the content of texts (`router.settings.rules`).
    """
    top = _mapping({})
    for path, key in keys_of(Config).items():
        section, _, name = path.rpartition(".")
        place = top["properties"].setdefault(section, _mapping({})) if section else top
        place["properties"][name] = _schema_fields(msgspec.json.schema(key.kind))
    # A file may also give a worker, and these arguments, as a mapping.
    options = "|".join(KEYS[1:])
    text = {"type": "string", "pattern": rf"^[^,]+(,\s*({options})=[^,]*)*$"}
    top["properties"]["workers"]["items"] = {"anyOf": [text, _worker()]}
    top["properties"]["chat_template_kwargs"]["type"] = ["string", "object"]
    # Names may be given as mappings: of a model, of models with their weights.
    weights = {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}}
    names = top["properties"]["names"]["properties"]
    for rules, meaning in (
        ("aliases", {"type": "string"}),
        ("targets", {"anyOf": [{"type": "string"}, weights]}),
    ):
        mapping = {"type": "object", "additionalProperties": meaning}
        about, lines = names[rules].pop("description"), names[rules]
        names[rules] = {"anyOf": [lines, mapping], "description": about}
    return top


def options_of_sources() -> Schema:
    """Return the schema of options that a source gives all of its workers: `kind=vllm,weight=2`, or
    nothing.
    """
    of_all = ("every", "scheme", *(key for key in KEYS if key not in _OF_ONE))
    option = rf"({'|'.join(of_all)})=[^,\s]+"
    return {"type": "string", "pattern": f"^({option}(,{option})*)?$"}


def _worker() -> Schema:
    keys = msgspec.json.schema_components([WorkerSpec])[1]["WorkerSpec"]["properties"]
    return _mapping({name: _schema_fields(keys[name]) for name in KEYS}) | {"required": ["url"]}


def _mapping(properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema_fields(schema: Schema) -> Schema:
    return {name: value for name, value in schema.items() if name not in _UNTOLD}


def schema_text() -> str:
    """Return the text of values.schema.json with the router's current `config` and options."""
    schema = json.loads(FILE.read_text(encoding="utf-8"))
    schema["properties"]["config"] = config_schema()
    schema["properties"]["discovery"]["properties"]["options"] = options_of_sources()
    return pretty(schema) + "\n"


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
