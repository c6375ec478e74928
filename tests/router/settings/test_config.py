"""Tests of the configuration: its layers and sources, which values are refused, and the error
messages.
"""

from __future__ import annotations

import argparse

import pytest

from router.cli.config import add_config_command, check_command, key_table
from router.config.keys import flag_of, keys_of, text_of, value_at, variable_of
from router.settings.load import effective_yaml, reloadable
from router.settings.reload import FIXED, REMOVED
from router.settings.schema import Config
from tests.router.settings.config_problems import loaded, problems_of
from tests.router.settings.config_values import WORKER, another_value, flags_beside


@pytest.mark.parametrize("path", REMOVED)
def test_the_error_for_a_removed_key_contains_its_replacement(path, tmp_path):
    section, _, name = path.rpartition(".")
    line = f"{section}:\n  {name}: 1\n" if section else f"{name}: 1\n"
    said = [
        problems_of(file=line, tmp_path=tmp_path),
        problems_of(flag_of(path), "1"),
        problems_of(env={variable_of(path): "1"}),
    ]
    sources = (str(tmp_path), f"flag {flag_of(path)}", variable_of(path))
    for text, source in zip(said, sources, strict=True):
        assert text.startswith(source)
        assert text.endswith(f": {path}: {REMOVED[path]}")


def test_a_shared_port_must_have_a_fixed_number():
    assert "name the port" in problems_of("--reuse-port", "true", "--port", "0")


def test_loading_models_through_triton_admin_requires_api_keys():
    assert "give api_keys_file" in problems_of("--triton-admin", "load")


def test_invalid_model_limits_are_refused():
    told = problems_of("--model-limits", "m:max_request=3")
    assert "flag --model-limits: model_limits" in told
    assert "keys, each once: max_requests, max_queued_tokens" in told


def test_an_empty_configuration_has_the_defaults():
    result = loaded()
    assert result.config == Config()
    assert set(result.sources.values()) == {"default"}


def test_flags_override_the_environment_and_it_overrides_the_file(tmp_path):
    file = "port: 1\nadmin_port: 2\nlimits:\n  messages: 3\nseed: 4\n"
    result = loaded(
        "--port",
        "11",
        file=file,
        env={"WARMROUTE_PORT": "21", "WARMROUTE_ADMIN_PORT": "22", "PATH": "/bin"},
        tmp_path=tmp_path,
    )
    config, where = result.config, result.sources
    assert (config.port, config.admin_port, config.limits.messages, config.seed) == (11, 22, 3, 4)
    assert where["port"] == "flag --port"
    assert where["admin_port"] == "WARMROUTE_ADMIN_PORT"
    assert where["limits.messages"] == f"{tmp_path / 'router.yaml'}:4"
    assert where["host"] == "default"


def test_every_key_can_be_set_by_flag_variable_and_file(tmp_path):
    for key in keys_of(Config).values():
        changed = another_value(key.path, tmp_path)
        texts = changed if isinstance(changed, tuple) else (text_of(changed),)
        flags = [part for text in texts for part in (key.flag, text)]
        beside = flags_beside(key.path, tmp_path)
        by_flag = loaded(*flags, *beside).config
        by_variable = loaded(*beside, env={key.variable: " ".join(texts)}).config
        section, _, name = key.path.rpartition(".")
        value = "[" + ", ".join(f"{t!r}" for t in texts) + "]" if key.is_list else texts[0]
        line = f"{section}:\n  {name}: {value}\n" if section else f"{name}: {value}\n"
        by_file = loaded(*beside, file=line, tmp_path=tmp_path).config
        for config in (by_flag, by_variable, by_file):
            assert value_at(config, key.path) == changed, key.path
            assert config != Config()


def test_workers_in_a_file_may_be_texts_or_mappings(tmp_path):
    file = f"workers:\n  - {WORKER},weight=2\n  - url: http://h:1/\n    max_requests: 8\n"
    config = loaded(file=file, tmp_path=tmp_path).config
    assert config.workers == (f"{WORKER},weight=2", "http://h:1,max_requests=8")


def test_a_flag_replaces_the_files_workers(tmp_path):
    config = loaded("--worker", WORKER, file="workers: [http://h:1]", tmp_path=tmp_path).config
    assert config.workers == (WORKER,)


def test_the_environment_may_set_the_path_of_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("seed: 5")
    assert loaded(env={"WARMROUTE_CONFIG": str(path)}).config.seed == 5


@pytest.mark.parametrize("text", ["", "# nothing\n", "limits:\n", "---\n"])
def test_an_empty_file_gives_the_defaults(text, tmp_path):
    assert loaded(file=text, tmp_path=tmp_path).config == Config()


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("port: 70000", "router.yaml:1: port: expected integer <= 65535; allowed: 0..65535"),
        ("seed: 1\nport: high", "router.yaml:2: port: expected integer, got string; allowed"),
        ("port: true", "port: expected integer"),
        ("port:", "port: expected integer, got null"),
        ("port: [1]", "port: expected integer, got array"),
        ("prot: 1", "router.yaml:1: unknown key prot; did you mean port?"),
        ("hold_s: 1", "unknown key hold_s; did you mean limits.hold_s?"),
        ("limits:\n  body_byte: 1", "router.yaml:2: unknown key limits.body_byte; did you"),
        ("zzz: 1", "keys: host, port"),
        ("wokers: []", "unknown key wokers; did you mean workers?"),
        ("ejection:\n  failure: 1", "key ejection.failure; did you mean ejection.failures?"),
        ("ejection:\n  hold: 1", "key ejection.hold; did you mean limits.hold_s?"),
        ("limts:\n  hold_s: 1", "router.yaml:1: unknown key limts; did you mean limits?"),
        ("ejection:\n  zzz: 1", "unknown key ejection.zzz; keys of ejection: failures, rate, "),
        ("port: 1\nport: 2", "router.yaml:2: port is given twice"),
        ("limits: 5", "limits must be a mapping"),
        ("- port", "the file must be a mapping"),
        ("[1, 2]: 3", "a key must be text"),
        ("port: [", "not YAML"),
        ("port: !!python/object:os.system 1", "not YAML"),
        ("port: \x00", "not YAML"),
        ("port: *nobody", "router.yaml:1: not YAML"),
        ("workers: &a [*a]", "recursive"),
        ("[" * 5_000, "not YAML"),
        ("seed: 2001-13-45", "seed"),
        ("limits:\n  hold_s: .nan", "limits.hold_s"),
        ("limits:\n  hold_s: .inf", "limits.hold_s"),
        ("log_level: loud", "allowed: debug, info, warning, error"),
        ("explain: maybe", "allowed: true, false"),
        ("chat_content_format: list", "allowed: auto, string, openai"),
        ("chat_template_kwargs: '[1]'", "give a JSON object"),
        ("chat_template_kwargs: '{'", "give a JSON object"),
        ("policy: hybird", "policy: no policy 'hybird' (did you mean hybrid?)"),
        ("policy: hybrid?load=1", "has no parameter 'load'; valid: load_factor"),
        ("policy: my_pkg.my_module:MyPolicy", "'my_pkg'; install it, or name the folder it"),
        ("policy: my_pkg.my_module", "policy my_pkg.my_module: `:attr` is missing; name a class"),
        ("workers: http://h:1", "workers: must be a list, got str"),
        ("workers: [http://h:1, h]", "workers[1]: 'h' is not of the form"),
        ("workers: [{url: 'http://h:1', kin: vllm}]", "did you mean kind?"),
        ("workers: [http://h:1, http://h:1/]", "workers[1]: http://h:1 is given twice"),
        (
            "workers: ['http://h:1,events=bind:tcp://*:5,topic=a', "
            "'http://h:2,events=bind:tcp://*:5,topic=a']",
            "workers[1]: http://h:1 takes the events with topic 'a' at tcp://*:5 already",
        ),
        ("limits: {workers: 1}\nworkers: [http://h:1, http://h:2]", "limits.workers is 1"),
        ("port: 8081", "port and admin_port are both 8081"),
        ("grpc_port: 8080", "port and grpc_port are both 8080"),
        ("grpc_port: 8081", "admin_port and grpc_port are both 8081"),
        ("tenant_header: x-session-id", "session_header and tenant_header"),
        ("session_header: X Session", "allowed: small letters"),
        ("session_header: x-warmroute-internal-a", "the router's own"),
        ("trusted_peers: [10.0.0.1/8]", "trusted_peers[0]: "),
        ("trusted_peers: [here]", "trusted_peers[0]: "),
        ("event_hosts: [ipc, 10.0.0.1/8]", "event_hosts[1]: '10.0.0.1/8' is no host; allowed: "),
        ("tokenizer: /no/such/folder", "tokenizer.json"),
        ("api_keys_file: /no/such/file", "is not a file"),
        ("admin_host: 0.0.0.0", "give admin_keys_file, or admin_open: true"),
        ("request_log: /no/such/log", "request_log: /no/such is not a folder; create it first"),
        ("record_facts: /", "record_facts: / is a folder; name a file in it"),
        ("request_log: /f\nrecord_facts: /f", "request_log and record_facts are both /f"),
        ("host: ''", "host: expected string of length >= 1"),
    ],
)
def test_an_invalid_file_is_refused_with_the_place_and_a_hint(file, says, tmp_path):
    assert says in problems_of(file=file, tmp_path=tmp_path)


def test_all_problems_are_reported_together(tmp_path):
    told = problems_of(
        "--seed", "-1", file="port: 99999\nfoo: 1", env={"WARMROUTE_PROT": "1"}, tmp_path=tmp_path
    )
    assert len(told.splitlines()) == 4
    assert "flag --seed: seed: expected integer >= 0; allowed: 0.." in told
    assert "WARMROUTE_PROT: no such key; did you mean WARMROUTE_PORT?" in told


def test_every_invalid_item_is_reported_with_its_line_in_file_order(tmp_path):
    file = (
        "zzz: 1\nseed: -1\nlimits:\n  hold_s: x\nworkers:\n"
        f"  - {WORKER},max_kv_fraction=90\n  - {WORKER}\n  - url: htp://x\n    weight: 1\n"
        f"  - {WORKER}\nport: high\n"
    )
    told = problems_of(file=file, env={"WARMROUTE_EXPLAIN": "?"}, tmp_path=tmp_path).splitlines()
    places = [line.removeprefix(str(tmp_path)).split(" ")[0] for line in told]
    lines = [1, 2, 4, 6, 8, 10, 11]
    assert places == [*(f"/router.yaml:{n}:" for n in lines), "WARMROUTE_EXPLAIN:"]
    assert told[3].endswith(":6: workers[0]: max_kv_fraction is 90; allowed: (0, 1]")
    assert "workers[2]: 'htp://x' is not of the form" in told[4]
    assert told[5].endswith(f"workers[3]: {WORKER} is given twice")
    assert all(line.count("allowed:") <= 1 for line in told)


def test_the_error_for_an_unknown_policy_does_not_mention_text():
    assert "allowed: text" not in problems_of("--policy", "hybird")


def test_errors_for_items_of_a_flag_contain_the_flag():
    told = problems_of("--worker", "htp://x", "--worker", WORKER, "--worker", "y").splitlines()
    assert [line.split("'")[0] for line in told] == [
        "flag --worker: workers[0]: ",
        "flag --worker: workers[2]: ",
    ]


def test_an_unreadable_or_too_large_file_is_refused(tmp_path):
    assert "cannot be read: No such file" in problems_of("--config", str(tmp_path / "none.yaml"))
    assert "cannot be read: Is a directory" in problems_of("--config", str(tmp_path))
    assert "larger than" in problems_of(file="#" * (1 << 20) + "\n", tmp_path=tmp_path)


def test_nested_yaml_aliases_are_not_expanded(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    for n in range(1, 30):
        lines.append(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]")
    assert "unknown key a29" in problems_of(file="\n".join(lines), tmp_path=tmp_path)


def test_service_variables_of_kubernetes_are_ignored():
    env = {
        "WARMROUTE_PORT": "tcp://10.0.0.7:8080",
        "WARMROUTE_SERVICE_HOST": "10.0.0.7",
        "WARMROUTE_SERVICE_PORT_HTTP": "8080",
        "WARMROUTE_PORT_8080_TCP_ADDR": "10.0.0.7",
    }
    assert loaded(env=env).config == Config()


def test_reload_applies_changeable_keys_and_gives_reasons_for_the_others():
    old = loaded().config
    new = loaded("--policy", "random", "--worker", WORKER, "--port", "1", "--limits-workers", "9")
    applied, refused = reloadable(old, new.config)
    assert applied == ["workers", "policy"]
    assert set(refused) == {"port", "limits.workers"}
    assert "restart" in refused["port"]
    assert reloadable(old, old) == ([], {})


def test_a_reload_may_change_the_state_url_but_not_add_or_remove_it():
    alone, one, other = (
        loaded(*flags).config
        for flags in ((), ("--state", "redis://a"), ("--state", "redis://:new@b:7000"))
    )
    assert reloadable(one, other) == (["state"], {})
    for old, new in ((alone, one), (one, alone)):
        applied, refused = reloadable(old, new)
        assert applied == []
        assert "read once at start" in refused["state"]
    (row,) = (line for line in key_table().splitlines() if line.startswith("| `state` |"))
    assert row.endswith("| to another; not from none or to none |")


def test_keys_that_need_a_restart_exist():
    assert set(FIXED) <= set(keys_of(Config))


def test_the_printed_configuration_loads_as_the_same(tmp_path):
    first = loaded("--worker", f"{WORKER},weight=2", "--policy", "hybrid?max_requests=none")
    text = effective_yaml(first)
    assert 'policy: "hybrid?max_requests=none"  # flag --policy' in text
    assert "  hold_s: 300.0  # default" in text
    assert loaded(file=text, tmp_path=tmp_path).config == first.config


def test_the_check_command_validates_and_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.environ", {})
    parser = argparse.ArgumentParser()
    add_config_command(parser)
    path = tmp_path / "c.yaml"
    path.write_text(f"workers: [{WORKER}]\n")
    assert check_command(parser.parse_args(["--check", str(path)])) == 0
    assert capsys.readouterr().out.startswith("ok: 1 of")
    assert check_command(parser.parse_args(["--check", str(path), "--print"])) == 0
    assert f'workers: ["{WORKER}"]  # {path}:1' in capsys.readouterr().out
    path.write_text("prot: 1\nseed: x\n")
    assert check_command(parser.parse_args(["--check", str(path)])) == 2
    assert capsys.readouterr().err.count("error: ") == 2
