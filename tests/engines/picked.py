"""Sends completions as clients send them through Envoy and the picker."""

from __future__ import annotations

import json
from typing import Any

from tests.engines.echo_worker import MODEL

PATH = "/v1/completions"


def body_of(prompt: str, **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, **more}).encode()
