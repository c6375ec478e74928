"""Tests of several engine instances on one device before they start: shares of memory, ports,
refusals, waits.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.capacity import (
    CONTEXT_BYTES,
    MAX_INSTANCES,
    CapacityError,
    Footprint,
    Limits,
    Measured,
    fit,
    share_out,
)
from engine.cli import main as cli
from engine.instances import BACK_OFF_MAX_S, PROVEN_S, Addresses, BackOff, addresses_of
from engine.model.tiny import make_tiny

GIB = 1 << 30
LLAMA_8B = Footprint(
    weights_bytes=15 * GIB,
    kv_bytes_per_token=131_072,
    activation_bytes_per_token=200_000,
)
GPU = Measured(72 * GIB, LLAMA_8B, Limits(), "cuda")


def test_a_gpu_is_shared_equally_and_the_table_shows_the_shares() -> None:
    shares = share_out(GPU, 2)
    assert shares.each_bytes == (72 * GIB - CONTEXT_BYTES) // 2
    assert shares.capacity == fit(shares.each_bytes, LLAMA_8B, Limits())
    assert shares.most == 4
    table = shares.report().splitlines()
    assert table[0] == "2 instances on cuda, which has 72.00 GiB for them; at most 4 would fit"
    assert table[2].split() == ["weights", "15.00", "GiB", "30.00", "GiB"]
    assert [line.split()[0] for line in table[2:7]] == [
        *("weights", "activations", "KV", "headroom", "share"),
    ]
    assert table[-1].startswith("each: 7,")
    # A fifth of what weights and activations leave stays unused.
    one = shares.capacity
    free_bytes = shares.each_bytes - one.weights_bytes - one.activation_bytes
    assert 0.2 * free_bytes <= one.headroom_bytes < 0.2 * free_bytes + 16 * 131_072


def test_the_error_for_too_many_instances_has_the_number_that_fits() -> None:
    with pytest.raises(CapacityError, match=r"5 instances have 14\.00 GiB each") as refused:
        share_out(GPU, 5)
    assert str(refused.value).endswith("; --instances 4 would fit")
    with pytest.raises(CapacityError, match="not even one instance would fit"):
        share_out(GPU, 2, memory_bytes=15 * GIB)
    with pytest.raises(CapacityError, match="have 0 B each"):
        share_out(GPU, 60, memory_bytes=GIB)


@given(
    memory_bytes=st.integers(0, 200 * GIB),
    instances=st.integers(1, MAX_INSTANCES),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_shares_never_exceed_the_memory(memory_bytes: int, instances: int, device: str) -> None:
    measured = Measured(memory_bytes, LLAMA_8B, Limits(), device)
    try:
        shares = share_out(measured, instances)
    except CapacityError as error:
        found = re.search(r"--instances (\d+) would fit", str(error))
        if found is not None:
            assert 0 < int(found[1]) < instances
            share_out(measured, int(found[1]))
        return
    one = shares.capacity
    parts = one.weights_bytes + one.activation_bytes + one.kv_bytes + one.headroom_bytes
    assert parts == shares.each_bytes
    assert instances * shares.each_bytes <= memory_bytes
    assert shares.most >= instances
    if shares.most < MAX_INSTANCES:
        with pytest.raises(CapacityError):
            share_out(measured, shares.most + 1)


def test_each_instance_has_the_ports_after_the_previous_instances() -> None:
    assert addresses_of(3, 8000, 0, 5600) == [
        *(Addresses(8000, 0, 5600), Addresses(8001, 0, 5601), Addresses(8002, 0, 5602)),
    ]
    assert addresses_of(2, 0, 0, 0) == [Addresses(0, 0, 0)] * 2
    assert Addresses(1, 2, 0).flags() == [
        *("--port", "1", "--events-port", "2", "--replay-port", "0"),
    ]


@pytest.mark.parametrize(
    ("ports", "told"),
    [
        ((8000, 8002, 0), "overlap"),
        ((8002, 0, 8000), "overlap"),
        ((65_534, 0, 0), "not all 1..65535"),
        ((-1, 0, 0), "not all 1..65535"),
    ],
)
def test_impossible_ports_are_refused(ports: tuple[int, int, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        addresses_of(3, *ports)


def test_ports_chosen_by_the_system_are_kept() -> None:
    line = (
        "ready http://[::1]:45001 model=a b=c events=tcp://[::1]:45002 "
        "replay=tcp://[::1]:45003 kv_tokens=4096"
    )
    assert Addresses(0, 0, 0).settled(line) == Addresses(45_001, 45_002, 45_003)
    with pytest.raises(ValueError, match="not a ready line"):
        Addresses(0, 0, 0).settled("ready")


def test_a_failing_instance_is_restarted_with_growing_delays() -> None:
    now_s = 100.0
    back_off = BackOff(lambda: now_s)
    waits = []
    for _ in range(9):
        waits.append(back_off.next_s())
        now_s += waits[-1] + 1.0
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, BACK_OFF_MAX_S]
    now_s += PROVEN_S
    assert back_off.next_s() == 0.0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--instances", "0"], "--instances must be 1..64"),
        (["--instances", "65"], "--instances must be 1..64"),
        (["--instances", "2", "--tensor-parallel-size", "2"], "give one of them"),
        (["--instances", "2", "--events-port", "8001"], "overlap"),
        (["--memory-bytes", "0"], "--memory-bytes must be"),
        (["--tenant-header", "x tenant"], "tenant header"),
        (["--pinned-share", "1"], "pinned_share must be 0..0.9"),
    ],
)
def test_bad_flags_are_rejected(
    tmp_path: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", str(tmp_path), *flags])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("instances", ["1", pytest.param("9", marks=pytest.mark.full)])
def test_a_missing_model_gives_exit_code_1(
    tmp_path: Path, instances: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A missing model ends the program with exit code 1. Several instances are first measured by
    another program, which the test below starts with `--instances 9`.
    """
    assert cli.main(["serve", str(tmp_path / "none"), "--instances", instances]) == 1
    assert "none" in capfd.readouterr().err


def test_too_many_instances_give_exit_code_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    several = ["--instances", "9", "--memory-bytes", "200000000"]
    make_tiny(tmp_path)
    assert cli.main(["serve", str(tmp_path), *several]) == 1
    assert "--instances 7 would fit" in capfd.readouterr().err


def test_a_measurement_survives_encoding_and_decoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny(tmp_path)
    assert cli.main(["serve", str(tmp_path), "--measure", "--block-size", "8"]) == 0
    measured = msgspec.json.decode(capsys.readouterr().out, type=Measured)
    assert (measured.device, measured.limits.block_size) == ("cpu", 8)
    assert measured.footprint.weights_bytes == 529_664
    assert share_out(measured, 2) == share_out(replace_memory(measured), 2, measured.memory_bytes)


def replace_memory(measured: Measured) -> Measured:
    return Measured(1, replace(measured.footprint), measured.limits, measured.device)
