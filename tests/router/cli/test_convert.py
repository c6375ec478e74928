"""Tests of `warmroute config --from`: command lines of other routers become configuration files
that our checker accepts.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import shlex
from pathlib import Path

import pytest
import yaml

from router.cli.convert import MAX_CHARACTERS, PeerCommandError, convert
from router.cli.main import main
from router.cli.peer_flags import FLAGS, NONE, PEERS, SEVERAL, PeerRouter, flags_of
from router.config.keys import keys_of
from router.settings.load import load_config
from router.settings.schema import Config

# Names of the flags and how many values each takes, as the releases' own parsers say.
THEIRS = json.loads(Path(__file__).with_name("peer_flags.json").read_text(encoding="utf-8"))
ROOT = Path(__file__).parents[3]
PROGRAMS = {
    "sglang-router": "python -m sglang_router.launch_router",
    "smg": "smg launch",
    "vllm-router": "vllm-router",
    "production-stack": "python3 -m vllm_router.app",
}
URLS = "--worker-urls http://worker1:8000 http://worker2:8000"
WORDS = {"--policy", "--routing-logic", "--log-level", "--log-format"}  # of a few allowed ones


def checked_config(text: str, folder: Path) -> Config:
    """Write the text to a configuration file and return its configuration. Fails if the checker
    rejects it.
    """
    path = folder / "converted.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(argparse.Namespace(config=str(path)), {}).config


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_flag_of_another_router_is_mapped_or_has_a_reason(peer: PeerRouter):
    rows = flags_of(peer)
    assert {name: row.takes for name, row in rows.items()} == THEIRS[peer.name]
    keys = keys_of(Config)
    for row in rows.values():
        if row.alias_of:
            assert row.alias_of in rows
        elif row.how:
            assert row.key in keys or row.how == "rule"
        else:
            assert row.why
            assert not row.key
    assert len({(row.name, one) for row in FLAGS for one in row.peers}) == sum(
        len(row.peers) for row in FLAGS
    )


def refusal(command: str) -> str:
    """Return why a command line is refused, or "" if it can be converted."""
    try:
        convert(command)
    except PeerCommandError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_single_flag_gives_a_valid_file_or_an_error(peer: PeerRouter, tmp_path: Path):
    for name, takes in THEIRS[peer.name].items():
        for value in ("7", "http://user:pw@host"):
            given = name if takes == NONE else f"{name} {shlex.quote(value)}"
            command = f"{PROGRAMS[peer.name]} {given}"
            if why := refusal(command):
                assert name in WORDS or (value != "7" and "must be a number" in why)
                assert why.startswith(f"{name} must be ")
                assert "pw@" not in why
                continue
            done = convert(command)
            assert done.peer is peer
            checked_config(done.text, tmp_path)
            assert name in done.text, "neither a line nor a reason"
            assert "pw@" not in done.text + done.summary()


@pytest.mark.parametrize("seed", range(8))
def test_many_flags_together_give_a_valid_file_or_one_error(seed: int, tmp_path, capsys):
    rng = random.Random(seed)
    peer = rng.choice(PEERS)
    words = PROGRAMS[peer.name].split()
    for name in rng.sample(sorted(THEIRS[peer.name]), 25):
        takes = THEIRS[peer.name][name]
        count = takes if takes < SEVERAL else rng.randrange(4)
        values = [rng.choice(["0", "-1", "1e9", "http://a:1", "a=b", "#\n", "é"]) for _ in "abc"]
        words += [name, *values[:count]]
    status = main(["config", "--from", shlex.join(words)])
    out, told = capsys.readouterr()
    if status:
        assert (out, status) == ("", 2)
        assert told.startswith("error: ")
    else:
        checked_config(out, tmp_path)


def converted(command: str, folder: Path) -> dict[str, object]:
    """Return the keys of the configuration file made from another router's command line."""
    done = convert(command)
    checked_config(done.text, folder)
    keys: dict[str, object] = yaml.safe_load(done.text)
    return keys


def test_examples_from_other_routers_documentation_are_converted(tmp_path: Path):
    two = ["http://worker1:8000", "http://worker2:8000"]
    assert converted(f"{PROGRAMS['sglang-router']} {URLS} --policy cache_aware", tmp_path) == {
        "host": "0.0.0.0",
        "port": 30000,
        "workers": two,
        "policy": "warmset",
        "timeouts": {"total_s": 1800},
    }
    parts = (
        "--prefill http://p1:30001 9001 --prefill http://p2:30002 "
        "--decode http://d1:30011 --policy cache_aware --prefill-policy cache_aware"
    )
    apart = converted(f"sgl-model-gateway --pd-disaggregation {parts}", tmp_path)
    assert apart["disaggregation"] == "always"
    assert apart["workers"] == [
        {"url": "http://p1:30001", "role": "prefill", "bootstrap_port": 9001},
        {"url": "http://p2:30002", "role": "prefill"},
        {"url": "http://d1:30011", "role": "decode"},
    ]
    retries = "--retry-max-retries 3 --retry-initial-backoff-ms 100 --retry-max-backoff-ms=10000"
    breaker = "--cb-failure-threshold 5 --cb-timeout-duration-secs 30"
    made = converted(f"vllm-router {URLS} {retries} {breaker}", tmp_path)
    assert made["host"] == "127.0.0.1"
    assert made["retries"] == {"attempts": 3, "backoff_s": 0.1, "backoff_max_s": 10}
    assert made["ejection"] == {"failures": 5, "recover_s": 30}
    pods = "--service-discovery --selector app=vllm-worker --service-discovery-namespace serving"
    assert converted(f"vllm-router {pods}", tmp_path)["discovery"] == ["kubernetes:serving/engines"]


def test_flags_distinguish_production_stack_from_the_other_vllm_router(tmp_path: Path):
    command = (
        'vllm-router --port 8000 \\\n --service-discovery static \\\n --static-backends "'
        'http://localhost:9001,http://localhost:9002" --static-models "a/b,c/d" '
        '--static-aliases "gpt4:c/d" --routing-logic roundrobin'
    )
    assert convert(command).peer.name == "production-stack"
    assert converted(command, tmp_path) == {
        "host": "0.0.0.0",
        "port": 8000,
        "workers": [
            {"url": "http://localhost:9001", "model": "a/b"},
            {"url": "http://localhost:9002", "model": "c/d"},
        ],
        "policy": "round_robin",
        "names": {"aliases": ["gpt4=c/d"]},
    }


@pytest.mark.parametrize("cap", ["", "--max-concurrent-requests -1"])
def test_a_queue_without_a_concurrency_cap_is_left_out(cap: str, tmp_path: Path):
    command = f"vllm-router {URLS} --queue-size 5 --queue-timeout-secs 9 {cap}"
    assert "limits" not in converted(command, tmp_path)
    assert "only with --max-concurrent-requests" in convert(command).summary()


def test_policies_keep_their_parameters_and_limits_their_sum(tmp_path: Path):
    made = converted(
        f"smg launch {URLS} --policy prefix_hash --prefix-token-count 128 "
        "--max-concurrent-requests 255 --queue-size 50 --cache-threshold 0.4",
        tmp_path,
    )
    assert made["policy"] == "prefix_hash?prefix_tokens=128"
    assert made["model_limits"] == ["*:max_requests=255"]
    assert made["limits"] == {"hold_requests": 50, "hold_s": 60}
    done = convert(f"smg launch {URLS} --spill-abs-threshold 32")
    assert "policy: cache_aware?balance_abs=32" in done.summary()
    assert converted(f"smg {URLS} --policy power_of_two", tmp_path)["policy"] == "smg_expected_wait"


def test_missing_tls_files_become_comments_and_existing_ones_settings(tmp_path: Path):
    cert = tmp_path / "cert.pem"
    command = f"smg launch {URLS} --tls-cert-path {cert} --tls-key-path /nowhere/key.pem"
    assert "tls" not in converted(command, tmp_path)
    assert "#   key: /nowhere/key.pem" in convert(command).text
    cert.touch()
    assert converted(command, tmp_path)["tls"] == {"cert": str(cert)}


def test_no_secret_is_printed(capsys: pytest.CaptureFixture[str]):
    secret = "sk-Zk3Q"
    for name in ("--api-key", "--tenant-api-key", "--control-plane-api-keys", "--oracle-password"):
        for between in (" ", "="):
            command = (
                f"smg launch {URLS} {name}{between}{secret} --apikey={secret} --apkey {secret}"
            )
            assert main(["config", "--from", command]) == 0
            out, told = capsys.readouterr()
            assert secret not in out + told
            assert name in out
            assert "--apikey" in told
    leaking = f"vllm-router {secret} --worker-urls http://me:{secret}@host:80"
    assert secret not in convert(leaking).text + convert(leaking).summary()


def test_differing_defaults_become_settings_or_comments(tmp_path: Path):
    command = f"{PROGRAMS['sglang-router']} {URLS}"
    made = converted(
        f"{command} --max-concurrent-requests 9 --health-check-timeout-secs 4", tmp_path
    )
    assert made["limits"] == {"hold_requests": 100, "hold_s": 60}
    assert made["timeouts"] == {"total_s": 1800, "probe_s": 4}
    assert "limits" not in converted(command, tmp_path), "there is no queue without a cap"
    text = convert(f"{command} --disable-retries").text
    assert "# limits.body_bytes: 536870912 in sglang-router, 16777216 here\n" in text
    assert "# retries.backoff_s: 0.05 in sglang-router, 0.025 here\n" in text
    assert "retries.attempts:" not in text, "a flag gives it"
    assert convert(command).taken == 1


@pytest.mark.parametrize("flag", ["", "--policy cache_aware"])
def test_the_other_routers_policy_is_a_comment_that_can_replace_the_line_above(flag, tmp_path):
    text = convert(f"{PROGRAMS['sglang-router']} {URLS} {flag} --cache-threshold 0.5").text
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("# policy: "))
    assert lines[at - 1].startswith("policy: warmset  # ")
    lines[at - 1 : at + 1] = [lines[at].removeprefix("# ")]
    assert checked_config("\n".join(lines), tmp_path).policy == "cache_aware?match_threshold=0.5"


def test_an_unknown_flag_gets_the_nearest_flag_as_a_hint():
    told = convert(f"smg launch {URLS} --polcy random").summary()
    assert "--polcy: smg 1.13.0 (October 2026) has no such flag (did you mean --policy?)" in told


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ('vllm-router --host "a', "within a quote"),
        ("nginx -c /etc/nginx.conf", "no known router"),
        (
            f"smg launch {URLS} --policy cache_awre",
            "--policy must be one of random, round_robin, p",
        ),
        (f"smg launch {URLS} --policy cache_awre", "prefix_hash (did you mean cache_aware?)"),
        ("amg --policy zzzz", "one of random, round_robin, cache_aware, power_of_two, manual"),
        ("amg --log-level wrn", "debug, info, warning, error (did you mean warning?)"),
        ("amg --port abc", "--port must be a number, 0..65535"),
        ("amg --port 65536", "--port must be a number, 0..65535"),
        ("amg --retry-max-retries x", "--retry-max-retries must be a number"),
        ("amg --retry-max-backoff-ms x", "--retry-max-backoff-ms must be a number"),
        ("amg --max-concurrent-requests x", "--max-concurrent-requests must be a number"),
        ("amg --cache-threshold x", "--cache-threshold must be a number"),
        ("smg launch --port", "--port has no value"),
        ("smg launch --port --host a", "--port has no value"),
        ("smg serve --model-path m", "starts engines, too"),
        ("python -m sglang_router.launch_server --model-path m", "starts engines, too"),
        ("smg " + "x" * MAX_CHARACTERS, "more than 65536 characters"),
    ],
)
def test_an_invalid_command_line_is_refused_in_one_sentence(command: str, said: str, capsys):
    with pytest.raises(PeerCommandError, match=re.escape(said)):
        convert(command)
    assert main(["config", "--from", command]) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert said in told
    assert told.count("\n") == 1


def test_a_command_line_of_the_maximum_length_is_converted(monkeypatch, capsys, tmp_path: Path):
    urls = " ".join(f"http://10.{n // 256}.{n % 256}.1:8000" for n in range(2_800))
    command = f"smg launch --worker-urls {urls}"
    assert len(command) <= MAX_CHARACTERS
    monkeypatch.setattr("sys.stdin", io.StringIO(command))
    assert main(["config", "--from", "-"]) == 0
    config = checked_config(capsys.readouterr().out, tmp_path)
    assert len(config.workers) == config.limits.workers == 2_800
