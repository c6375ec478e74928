"""Tests of `warmroute-sim` on wrong input: exit status 2, and a message that says what is wrong,
where, and what would work.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulator.cli_support import FLEET, Run, mooncake, run, trace
from tests.simulator.trace_lines import write

__all__ = ["run"]
SWEEP = "workload: {{source: {trace}}}\nfleet: {{profile: {profile}, count: 2}}\n{more}"

WRONG_OPTIONS = [
    (["--policy", "nope"], "no policy 'nope'; valid: round_robin, "),
    (["--policy", "hybrid?nope=1"], "valid: load_factor"),
    (["--policy", "hybrid?load_factor=x"], "could not convert string to float: 'x'"),
    (["--policy", "nowhere.at:all"], "nowhere"),
    (["--profile", "nope"], "--profile: unknown profile 'nope'; valid ones: deepseek-r1"),
    (["--profile", "nope.json"], "profile nope.json: cannot be read: No such file"),
    (["--format", "nope"], "format 'nope': expected auto, qwen, mooncake"),
    (["--format", "requests?nope=1"], "unknown key 'nope'; valid ones: model"),
    (["--block-size", "7"], "choose a block size that divides 512 or is a multiple of it"),
    (["--block-size", "0"], "--block-size: 0 is not a whole number of 1 or more"),
    (["--block-tokens", "16"], "hash_ids: "),
    (["--workers", "0"], "--workers: 0 is not a whole number of 1 or more"),
    (["--workers", "5000"], "5000 workers in all; expected 1..4096"),
    (["--kv-tokens", "1e99x"], "is not a whole number"),
    (["--kv-tokens", "100"], "less than one block of 512 tokens"),
    (["--kv-tokens", "1024"], "no request can run: the shortest of the first 24 prompts has 1300"),
    (["--speed", "0"], "--speed: 0 is not a number above 0"),
    (["--speed", "nan"], "nan is not a number above 0"),
    (["--speed", "2", "--rate", "2"], "not allowed with argument"),
    (["--requests", "0"], "--requests: 0 is not a whole number"),
    (["--seed", "-1"], "-1 is not a whole number of 0 or more"),
    (["--resamples", "1"], "--resamples: 2 or more, for one draw has no interval"),
    (["--resamples", "0"], "--resamples: 0 is not a whole number of 1 or more"),
    (["--resamples", "10001"], "10001: 10000 at most"),
    (["--resamples", "3", "--seed", "1", "--seed", "2"], "follow one --seed; name one at most"),
    (["--resample", "--requests", "1"], "resample: all 1 requests are of one session"),
    (["--seconds", "inf"], "inf is not a number above 0"),
    (["--event-loss", "1"], "1 is not a share"),
    (["--no-events", "--event-loss", "0.1"], "with --no-events there are none"),
    (["--network-ms", "1e12"], "world.network_ms: 1000000000000.0; expected 0..8.64e+07"),
    (["--faults", "nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory"),
    (["--group", "foo"], "--group foo: 'foo' is not key=value"),
    (["--group", "count=1,count=2"], "'count=2' is not key=value, or is given twice"),
    (["--group", "profile=llama-3.1-8b-h100"], "missing required field `count`"),
    (["--group", "count=2,nope=1"], "unknown field `nope`"),
    (["--group", "count=2,nope=1"], "keys: count, profile, kv_tokens, speed"),
    (["--group", "count=2,kv_tokens=1.5"], "$.kv_tokens"),
    (["--group", "count=2,profile=nope"], "unknown profile 'nope'"),
    (["--group", "count=-1"], "-1; expected 0 or more"),
    (["--group", "count=0"], "0 workers in all; expected 1..4096"),
    (["--group", "count=2", "--workers", "2"], "--workers belongs into --group"),
    (["--group", "count=2", "--kv-tokens", "2k"], "--kv-tokens belongs into --group"),
    (["--json", "/nowhere/r.json"], "--json /nowhere/r.json: there is no folder /nowhere"),
    (["--html", "/"], "--html /: is a folder"),
    (["--json", "r", "--html", "./r"], "--html r: --json writes it, too; name another file"),
    (["--csv", "r.csv"], "--csv holds one replay and this is 4: name one --policy and one --seed"),
    (["--nope"], "unrecognized arguments: --nope"),
    (["--jobs", "0"], "--jobs: 0 is not"),
]


@pytest.mark.parametrize(("options", "said"), WRONG_OPTIONS)
def test_the_error_for_a_wrong_option_is_short_and_names_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run("replay", trace(tmp_path), *options)
    assert found.status == 2
    assert said in found.err
    assert "Traceback" not in found.err
    assert len(found.err) < 1200, "no wall of options in front of what is wrong"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace"], "nothing was begun"


def junk(folder: Path) -> None:
    (folder / "trace").write_bytes(bytes(range(256)) * 400)


def cut(folder: Path) -> None:
    data = gzip.compress((trace(folder)).read_bytes())
    (folder / "trace").write_bytes(data[: len(data) // 2])


WRONG_FILES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: None, "trace: cannot be read: No such file or directory"),
    (lambda folder: (folder / "trace").mkdir(), "trace: holds no part of a trace"),
    (lambda folder: (folder / "trace").write_text(""), "trace: holds no requests"),
    (lambda folder: (folder / "trace").write_text("\n\n"), "trace: "),
    (lambda folder: os.mkfifo(folder / "trace"), "is not a regular file"),
    (junk, "its first lines are of no known format; name one of: qwen, mooncake"),
    (cut, "damaged"),
    (lambda folder: write(folder, {"hello": "world"}), "of no known format"),
    (
        lambda folder: write(folder, mooncake(0, input_length=-5)),
        "line 1: Expected `int` >= 1 - at `$.input_length`",
    ),
]


@pytest.mark.parametrize("command", ["replay", "plan", "bound", "hits"])
@pytest.mark.parametrize(("made", "said"), WRONG_FILES)
def test_the_error_for_a_wrong_file_names_the_problem(
    run: Run, tmp_path: Path, command: str, made: Callable[[Path], object], said: str
) -> None:
    made(tmp_path)
    needs = {"plan": ("--ttft-p90-ms", "1000"), "hits": ("--kv-tokens", "1M")}
    found = run(command, tmp_path / "trace", *needs.get(command, ()))
    assert found.status == 2
    assert said in found.err
    assert str(tmp_path / "trace") in found.err
    assert "failed" not in found.out, "told before anything is replayed"


@pytest.mark.parametrize("command", ["replay", "plan", "bound", "hits", "sweep"])
def test_wrong_lines_of_a_trace_are_counted_and_shown(
    run: Run, tmp_path: Path, command: str
) -> None:
    lines = [mooncake(number) for number in range(30)]
    lines[4] = mooncake(4, output_length="many")
    path = Path(write(tmp_path, *lines[:20], "{broken", *lines[20:]).source)
    sheet = tmp_path / "sweep.yaml"
    sheet.write_text(SWEEP.format(trace=path, profile=FLEET[-1], more="grid: {policies: [hybrid]}"))
    needs: dict[str, tuple[object, ...]] = {
        "replay": (path, *FLEET, "--policy", "hybrid"),
        "plan": (path, *FLEET, "--policy", "hybrid", "--seed", 1, "--ttft-p90-ms", "5000"),
        "bound": (path, *FLEET, "--policy", "hybrid", "--no-waterfall"),
        "hits": (path, "--kv-tokens", "1M"),
        "sweep": (sheet,),
    }
    found = run(command, *needs[command])
    assert found.status == 0, found.err
    assert "2 wrong lines" in found.out
    assert f"{path}, line 5: Expected `int`, got `str` - at `$.output_length`" in found.out
    assert f"{path}, line 21: JSON is malformed" in found.out


def test_strict_stops_at_the_first_wrong_line(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(0), mooncake(1, hash_ids="no"), "{broken").source
    found = run("replay", path, "--strict")
    assert found.status == 2
    assert f"{path}, line 2: Expected `array`, got `str` - at `$.hash_ids`" in found.err


WRONG_FAULTS = [
    ("{at_s: 1, do: explode, worker: 0}", "[0].do: 'explode'; expected one of: die, restart, "),
    ("{at_s: 1, do: die, worker: 8}", "die at 1 s: worker 8 does not exist then; expected 0..7"),
    ("{at_s: 1, do: die}", "[0].worker: missing; expected a whole number, 0 or more"),
    ("{at_s: -1, do: die, worker: 0}", "[0].at_s: -1; expected a number of 0..1e+09"),
    ("{at_s: 1, do: hang, worker: 0}", "[0].for_s: missing"),
    ("{at_s: 1, do: die, worker: 0, for_s: 2}", "[0].for_s: no key of die; it takes: at_s, do"),
    ("just text", "expected keys such as at_s, worker, do; got 'just text'"),
    ("{", "not YAML"),
]


@pytest.mark.parametrize(("item", "said"), WRONG_FAULTS)
def test_the_error_for_a_wrong_timeline_names_file_and_problem(
    run: Run, tmp_path: Path, item: str, said: str
) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text(f"- {item}\n")
    found = run("replay", trace(tmp_path), "--faults", faults)
    assert found.status == 2
    assert said in found.err
    assert str(faults) in found.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "gen:nope"], "generator 'nope': expected one of: sglang, vllm"),
        (["replay", "gen:zipf?nope=1"], "unknown key 'nope'; valid ones: burstiness, children"),
        (["replay", "gen:zipf?groups=x"], "groups=x"),
        (["replay", "gen:zipf", "--format", "azure"], "is for files"),
        (["plan", "t", "--rule", "nope"], "invalid choice: 'nope'"),
        (["plan", "t"], "no target; give at least one of --ttft-mean-ms, --ttft-p90-ms"),
        (["plan", "t", "--ttft-p90-ms", "9", "--rule", "interval", "--seed", "1"], "two or more"),
        (["plan", "t", "--ttft-p90-ms", "9", "--group", "count=1", "--group", "count=1"], "group"),
        (["plan", "t", "--ttft-p90-ms", "9", "--json", "t"], "t is read by this command"),
        (["plan", "t", "--goodput-share", "1.5"], "1.5 is not a share"),
        (["hits", "t"], "required: --kv-tokens"),
        (["hits", "t", "--kv-tokens", "0"], "0 is not a whole number"),
        (["hits", "t", "--kv-tokens", "1M", "--rule", "nope"], "invalid choice: 'nope'"),
        (["hits", "t", "--kv-tokens", "1M", "--closed-loop"], "--closed-loop"),
        (["hits", "t", "--kv-tokens", "1M", "--json", "t"], "t is read by this command"),
        (["bound", "t", "--closed-loop"], "--closed-loop"),
        (["bound", "t", "--seed", "1", "--seed", "2"], "bounds are for one seed"),
        (["learn", "mine.yaml"], "`sweep` compares policies"),
        (["sample", "--out", "s.jsonl.gz"], "gen:sessions"),
        (["bound", "t", "--policy", "nope"], "no policy 'nope'"),
        (["sweep", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["sweep", "t"], "t:2: not YAML"),
        (["calibrate", "nowhere.csv"], "nowhere.csv: cannot be read"),
        (["calibrate", "t"], "t, line 1: no column prefill_tokens"),
        (["calibrate", "t", "--out", "mine.txt"], "a profile's name ends in .json"),
        (["check-facts", "nowhere"], "nowhere: cannot be read: No such file or directory"),
        (["check-facts", "t"], "no recording"),
        (["validate", "nowhere"], "nowhere: cannot be read"),
        (["validate", "t", "--policy", "nope"], "no policy 'nope'"),
        (["validate", "t", "--closed-loop"], "--closed-loop"),
        (["validate", "t", "--out", "/dev/null"], "cannot be made"),
        ([], "COMMAND"),
        (["nope"], "invalid choice: 'nope'"),
    ],
)
def test_the_error_for_other_wrong_arguments_names_the_problem(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    trace(tmp_path).rename("t")
    found = run(*arguments)
    assert found.status == 2
    assert said in found.err


@pytest.mark.parametrize("option", ["--json", "--html", "--csv"])
def test_a_report_never_overwrites_its_trace(run: Run, tmp_path: Path, option: str) -> None:
    path = trace(tmp_path)
    before = path.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(path)
    found = run("replay", path, *FLEET, "--policy", "hybrid", option, link)
    assert found.status == 2
    assert "is read by this command; name another file" in found.err
    assert path.read_bytes() == before


@pytest.mark.parametrize("option", ["--json", "--html", "--csv"])
def test_a_full_disk_gives_a_one_line_error(run: Run, tmp_path: Path, option: str) -> None:
    found = run("replay", trace(tmp_path), *FLEET, "--policy", "hybrid", option, "/dev/full")
    assert found.status == 1
    assert found.err == "warmroute-sim: No space left on device\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--resamples", "1"], "--resamples: 2 or more, for one draw has no interval"),
        (["--resamples", "-3"], "-3 is not a whole number of 1 or more"),
        (["--resamples", "3", "--quick"], "--quick is of one seed; leave out --resamples"),
    ],
)
def test_a_study_with_impossible_resamples_is_refused(
    run: Run, tmp_path: Path, options: list[str], said: str
) -> None:
    found = run("study", "--out", tmp_path / "out", *options)
    assert found.status == 2
    assert said in found.err
    assert not (tmp_path / "out").exists()
