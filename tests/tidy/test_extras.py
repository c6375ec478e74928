"""Tests that an error on a missing library of an extra shows the pip command that installs it."""

from __future__ import annotations

import tomllib

import pytest

from engine.cli.options import NEEDS_TORCH
from router.discovery.kubernetes_watch import MISSING as NO_KUBERNETES
from router.record.trace_export import NO_OTEL
from router.settings.rules import NO_GRPC
from router.tokens.encoders import NO_TOKENS
from simulator.cli.command_line import OF_EXTRAS
from simulator.report.plots import MISSING as NO_MATPLOTLIB
from simulator.runs.executor import DASK_MISSING
from tests.tidy.checkout import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
MESSAGES = {
    "aic": OF_EXTRAS["aiconfigurator_core"],
    "dask": DASK_MISSING,
    "demo": NO_MATPLOTLIB,
    "engine": NEEDS_TORCH,
    "grpc": NO_GRPC,
    "kubernetes": NO_KUBERNETES,
    "otel": NO_OTEL,
    "sim": OF_EXTRAS["scipy"],
    "tokens": NO_TOKENS,
}


def test_each_extra_for_users_has_an_error_message() -> None:
    assert {name for name in EXTRAS if not name.startswith("dev")} == MESSAGES.keys()


@pytest.mark.parametrize("extra", MESSAGES)
def test_the_install_line_has_the_versions_of_the_extra(extra: str) -> None:
    own = [f"'{one}'" for one in EXTRAS[extra] if not one.startswith("warmroute[")]
    line = f"pip install {' '.join(own)} (or '.[{extra}]' in the checkout)"
    assert MESSAGES[extra].endswith(line)
