"""Tests that the chart's values.schema.json has each key of the router, and no other, at
any depth.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from router.config.keys import keys_of
from router.settings.schema import Config
from tests.deploy.config_schema import FILE, schema_text
from tests.router.settings.config_values import another_value, nested

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads(FILE.read_text(encoding="utf-8"))["properties"]["config"]
CHECK = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)


def test_the_schema_is_generated_from_the_routers_keys() -> None:
    told = "run: python -m tests.deploy.config_schema"
    assert FILE.read_text(encoding="utf-8") == schema_text(), told


def test_the_schema_accepts_every_key(tmp_path: Path) -> None:
    CHECK.validate(nested({path: another_value(path, tmp_path) for path in keys_of(Config)}))


def test_the_schema_refuses_unknown_keys_and_wrong_types() -> None:
    for path, key in keys_of(Config).items():
        assert not CHECK.is_valid(nested({f"{path}x": key.default})), path
        wrong: list[Any] = [{"a": 1}, [[]]]
        if isinstance(key.default, int | float):
            wrong.append("yes" if isinstance(key.default, bool) else str(key.default))
        elif key.path == "chat_template_kwargs":  # JSON, or what it says
            wrong = [1, []]
        for value in wrong:
            assert not CHECK.is_valid(nested({path: value})), (path, value)


def test_the_schema_accepts_the_examples_of_the_documents() -> None:
    known = SCHEMA["properties"].keys()
    taken = []
    pages = {*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "kubernetes.md"}  # whose are values
    for page in sorted(pages):
        for text in re.findall(r"(?ms)^```yaml\n(.*?)^```", page.read_text(encoding="utf-8")):
            example = yaml.safe_load(text)
            if isinstance(example, dict) and example.keys() <= known:
                CHECK.validate(example)
                taken.append(page.name)
    assert {"configuration.md", "replicas.md", "triton.md", "discovery.md"} <= {*taken}
