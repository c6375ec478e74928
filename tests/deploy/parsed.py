"""Parses command lines in deployment files with the programs' own parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import engine.cli.main
import router.cli.main
from router.settings.load import load_config
from router.settings.schema import Config

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
ENGINE_PATHS = {"/health", "/metrics"}
ROUTER_PATHS = {"/health", "/ready"}


def router_config(arguments: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Return the configuration that `warmroute` reads from its arguments. Exits or raises
    ConfigError if they are invalid.
    """
    args = router.cli.main._parser().parse_args(arguments)
    assert args.command == "serve"
    return load_config(args, environ).config


def engine_ports(arguments: Sequence[str]) -> dict[str, int]:
    """Return the ports of an engine with these arguments: HTTP, events, replays."""
    flags = engine.cli.main.parser().parse_args(arguments)
    assert flags.host == "0.0.0.0", "nobody else reaches it"
    return {"http": flags.port, "events": flags.events_port, "replay": flags.replay_port}
