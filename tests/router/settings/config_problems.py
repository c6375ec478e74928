"""Helpers for tests that read the error messages of a configuration that cannot be used."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from router.cli.config import add_flags
from router.config.file import ConfigError
from router.settings.load import Loaded, load_config


def loaded(*flags: str, file: str | None = None, env=None, tmp_path: Path | None = None) -> Loaded:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    arguments = list(flags)
    if file is not None:
        assert tmp_path is not None
        path = tmp_path / "router.yaml"
        path.write_text(file, encoding="utf-8")
        arguments += ["--config", str(path)]
    return load_config(parser.parse_args(arguments), env or {})


def problems_of(*flags: str, **more) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(*flags, **more)
    return str(caught.value)
