"""Tests of rules of names in files, flags and environment variables, and of the errors for wrong
ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from router.settings.load import effective_yaml
from tests.router.settings.config_problems import loaded, problems_of

MAPPED = """names:
  aliases:
    gpt-4o: llama
    claude-*: llama@v1
  targets:
    chat:
      llama@v1: 90
      llama@v2: 10
"""
LISTED = """names:
  aliases: ["gpt-4o=llama", "claude-*=llama@v1"]
  targets:
  - chat=llama@v1:90,llama@v2:10
"""
ALIASES = ("gpt-4o=llama", "claude-*=llama@v1")
TARGETS = ("chat=llama@v1:90,llama@v2:10",)


@pytest.mark.parametrize("file", [MAPPED, LISTED])
def test_a_file_may_have_name_rules_as_a_list_or_a_mapping(tmp_path: Path, file: str) -> None:
    found = loaded(file=file, tmp_path=tmp_path)
    assert (found.config.names.aliases, found.config.names.targets) == (ALIASES, TARGETS)
    again = loaded(file=effective_yaml(found), tmp_path=tmp_path)
    assert again.config == found.config


def test_flags_and_variables_have_name_rules_as_lines() -> None:
    flags = [word for line in ALIASES for word in ("--names-aliases", line)]
    assert loaded(*flags).config.names.aliases == ALIASES
    env = {"WARMROUTE_NAMES_ALIASES": " ".join(ALIASES), "WARMROUTE_NAMES_TARGETS": TARGETS[0]}
    names = loaded(env=env).config.names
    assert (names.aliases, names.targets) == (ALIASES, TARGETS)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ('names:\n  aliases:\n  - a=b\n  - "x"\n', "router.yaml:4: names.aliases[1]: 'x' is not"),
        ("names:\n  aliases: a=b\n", "router.yaml:2: names.aliases: must be a list"),
        ("names:\n  aliases: {a: 1}\n", "router.yaml:2: names.aliases: 'a': expected a model"),
        ("names:\n  targets: {a: {m: -1}}\n", "names.targets[0]: 'a=m:-1': a weight must be"),
        ("names:\n  targets: {a: {m: .nan}}\n", "names.targets[0]: 'a=m:nan': a weight must be"),
        ("names:\n  targets: {a: {m: 0, n: 0}}\n", "all weights are 0; give one of them more"),
        ("names:\n  aliases: {a: b, b: a}\n", "names: names lead in a circle: 'a' -> 'b' -> 'a'"),
        ("names:\n  aliases: [a=b, a=c]\n", "names: 'a' is given twice; give each name once"),
        ("names:\n  missing_model: maybe\n", "names.missing_model: "),
        ("names:\n  alias: [a=b]\n", "did you mean names.aliases?"),
    ],
)
def test_the_error_contains_the_invalid_name_rule(tmp_path: Path, file: str, said: str) -> None:
    assert said in problems_of(file=file, tmp_path=tmp_path)


def test_ten_thousand_aliases_fit_into_a_file(tmp_path: Path) -> None:
    lines = "".join(f"    name-{n}: model-{n % 9}\n" for n in range(10_000))
    found = loaded(file=f"names:\n  aliases:\n{lines}", tmp_path=tmp_path)
    assert len(found.config.names.aliases) == 10_000
