"""Tests of docs/coming-from.md: its files are those that the command prints, and its keys exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from policies.load import load
from router.cli.convert import convert
from router.cli.peer_flags import PEERS
from router.config.keys import keys_of
from router.settings.schema import Config

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from.md").read_text(encoding="utf-8")
SHOWN = re.findall(
    r"^## ([\w-]+)\n\n```sh\n(warmroute config --from .*?)```\n\n```yaml\n(.*?)```",
    PAGE,
    re.MULTILINE | re.DOTALL,
)


def test_each_router_that_the_command_converts_has_a_section():
    assert [name for name, _, _ in SHOWN] == [peer.name for peer in PEERS]


@pytest.mark.parametrize(("name", "command", "file"), SHOWN, ids=[name for name, _, _ in SHOWN])
def test_each_file_on_the_page_is_the_output_of_its_command(name: str, command: str, file: str):
    words = shlex.split(command)
    assert words[:3] == ["warmroute", "config", "--from"]
    done = convert(words[3])
    assert done.peer.name == name
    shown, cut, _ = file.partition("# ...\n")  # the page leaves out the file's last lines
    assert done.text.startswith(shown) if cut else done.text == file
    assert "has no such flag" not in done.summary()


def test_keys_and_policies_in_the_tables_exist():
    names, specs = set(), set()
    tables = PAGE.partition("\n## llm-d\n")[2]
    for ours in re.findall(r"^\| [^|\n]+ \| ([^|\n]+) \|$", tables, re.MULTILINE):
        for text in re.findall(r"`([^`]+)`", ours):
            names |= set(re.findall(r"^([a-z_]+(?:\.[a-z_]+)?)(?:: .*|)$", text))
            specs |= set(re.findall(r"^(?:policy: )?(\w+\?.*|(?<=policy: )\w+)$", text))
    keys = set(keys_of(Config))
    rules = {"warmset", "round_robin", "random", "power_of_two", "least_requests", "least_tokens"}
    others = {"requests_per_s", "tokens_per_s"}  # of API keys
    others |= {"always", "weight", "temperature", "priority", "api_base"}  # values, options, theirs
    assert names - rules - others <= keys
    assert len(names & keys) > 20
    for spec in specs | rules:
        load(spec.replace("=N", "=1"))
