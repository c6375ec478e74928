"""What a router's start brings in: nothing that only some routers need."""

from __future__ import annotations

import subprocess
import sys

OPTIONAL = ("redis", "hiredis", "opentelemetry", "kubernetes_asyncio", "tokenizers", "jinja2")
NEVER = ("torch", "scipy", "matplotlib")


def test_a_router_starts_without_what_it_was_not_asked_for() -> None:
    code = "import sys, router.cli.serve; print(*sys.modules)"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(asked.stdout.split())
    assert "router.cli.serve" in imported
    assert imported.isdisjoint({*OPTIONAL, *NEVER})
