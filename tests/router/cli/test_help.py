"""Tests of `warmroute serve --help` and `--help-all`, and of the sentences in `config --print`."""

from __future__ import annotations

import re

import pytest
import yaml

from router.cli.main import main
from router.config.keys import keys_of
from router.settings.groups import MAIN, groups
from router.settings.load import SECTIONS
from router.settings.schema import Config
from tests.router.settings.config_problems import loaded


def help_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0
    return capsys.readouterr().out


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", text, re.MULTILINE))


def test_the_help_shows_the_main_flags_in_groups_and_three_examples(capsys):
    text = help_text(capsys, "serve", "--help")
    keys = keys_of(Config)
    main_flags = {keys[path].flag for group in MAIN for path in group.paths}
    assert flags_in(text) == {"--help", "--help-all", "--config"} | main_flags
    assert [group.title for group in MAIN if f"\n{group.title}:\n" not in text] == []
    examples = re.findall(r"^  warmroute (serve .*)$", text, re.MULTILINE)
    assert len(examples) == 3
    known = {key.flag for key in keys.values()} | {"--config"}
    assert {word for line in examples for word in re.findall(r"--[a-z-]+", line)} <= known


def test_help_all_shows_all_flags_by_group(capsys):
    text = help_text(capsys, "serve", "--help-all")
    words = " ".join(text.split())
    for key in keys_of(Config).values():
        assert f"{key.flag} " in words
        assert f"[env {key.variable}]" in words
    for group in groups():
        assert f"\n{group.title}:\n  {group.about[:40]}" in text


def test_every_key_is_in_one_group_and_every_section_has_a_sentence():
    paths = [path for group in groups() for path in group.paths]
    assert sorted(paths) == sorted(keys_of(Config))
    assert {group.title for group in groups()} >= SECTIONS
    assert all(group.about.endswith((".", ").")) for group in groups())


def test_config_print_explains_each_key_and_is_a_valid_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.environ", {})
    assert main(["config", "--print", "--port", "1234"]) == 0
    text = capsys.readouterr().out
    assert "port: 1234  # flag --port" in text
    assert yaml.safe_load(text)["port"] == 1234
    comments = " ".join(re.findall(r"^ *# (.*)$", text, re.MULTILINE))
    for key in keys_of(Config).values():
        assert " ".join(key.help.split()) in comments, key.path
    for group in groups():
        assert group.about in comments
    path = tmp_path / "printed.yaml"
    path.write_text(text, encoding="utf-8")
    assert main(["config", "--check", str(path)]) == 0
    again = loaded(file=text, tmp_path=tmp_path)
    assert again.config == loaded("--port", "1234").config


@pytest.mark.parametrize(
    ("path", "metavar"),
    [
        *(("port", "N"), ("drain_s", "SECONDS"), ("policy_slow_ms", "MS"), ("explain", "true|")),
        *(("limits.body_bytes", "BYTES"), ("relay", "auto|python"), ("tls.cert", "FILE")),
    ],
)
def test_help_shows_the_form_of_a_value(path, metavar):
    assert keys_of(Config)[path].metavar.startswith(metavar)
