"""Tests that the emulator finds planted faults, and that its narrow floats equal torch's."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkernels.cuda import library as build
from kvkernels.cuda.library import KernelLibrary, LaunchError
from tests.kernels.emulated import emulator_beside, needs_compiler

pytestmark = needs_compiler
SOUND, NO_WAIT = 0, 1
SEEDS = range(1, 9)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    """Return the emulator with the kernels of `emulator_faults.cu` instead of ours."""
    source = Path(__file__).with_name("emulator_faults.cu")
    return emulator_beside(source, tmp_path_factory.mktemp("faults"))


def reverse(library: KernelLibrary, fault: int, seed: int) -> bool:
    """Run the kernel that reverses words, with a fault; return whether the words came back
    reversed.
    """
    library.functions.wr_emulator_seed(ctypes.c_uint64(seed))
    data = torch.arange(64, dtype=torch.int32)
    library.call("test_reverse", (data, fault))
    return data.tolist() == list(range(63, -1, -1))


def test_correct_code_is_right_in_every_order_of_threads(faulty: KernelLibrary) -> None:
    assert all(reverse(faulty, SOUND, seed) for seed in SEEDS)


def test_a_missing_wait_gives_wrong_results(faulty: KernelLibrary) -> None:
    assert not all(reverse(faulty, NO_WAIT, seed) for seed in SEEDS)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (2, "wrote, with no barrier since"),
        (9, "wrote, with no barrier since"),
        (3, "threads 0-31 are at the CTA's barrier; threads 32-63 are at the end;"),
        (4, "a warp diverged"),
        (5, "a store of 4 bytes is outside every tensor"),
        (6, "an asynchronous copy's source of 16 bytes is not aligned"),
        (7, "a shared load of 4 bytes at offset 256 of 256 shared bytes"),
        (8, "deadlock in CTA 0, 0:"),
    ],
)
def test_the_emulator_reports_faults(faulty: KernelLibrary, fault: int, says: str) -> None:
    with pytest.raises(LaunchError, match="reverse: ") as failed:
        reverse(faulty, fault, 1)
    assert says in str(failed.value)
    assert reverse(faulty, SOUND, 1), "the next launch is none the worse"


def chain(library: KernelLibrary, fault: int, seed: int) -> bool:
    """Run two launches with a fault; return whether the second one read what the first
    one wrote.
    """
    library.functions.wr_emulator_seed(ctypes.c_uint64(seed))
    written, out = torch.zeros(2, 64, dtype=torch.int32)
    library.call("test_chain", (written, out, fault))
    return out.tolist() == [*range(1, 34), *[0] * 31]


def test_a_dependent_launch_that_waits_is_right(faulty: KernelLibrary) -> None:
    assert all(chain(faulty, SOUND, seed) for seed in SEEDS)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (1, "before wait_prerequisite_grids"),
        (2, "a load from a tensor that is stored to before wait_prerequisite_grids (thread 7 of"),
        (3, "a store before wait_prerequisite_grids (thread 7 of"),
        (4, "an end before wait_prerequisite_grids"),
        (5, "is dependent, with no launch before it"),
    ],
)
def test_the_emulator_reports_early_accesses_of_a_dependent_launch(
    faulty: KernelLibrary, fault: int, says: str
) -> None:
    for seed in SEEDS:
        with pytest.raises(LaunchError, match="read: ") as failed:
            chain(faulty, fault, seed)
        assert says in str(failed.value)
    assert chain(faulty, SOUND, 1), "the next call is none the worse"


def bits_of(x: float) -> int:
    return int(torch.tensor(x, dtype=torch.float32).view(torch.int32)) & 0xFFFFFFFF


@given(st.floats(width=32) | st.floats(-500, 500, width=32))
def test_narrowing_rounds_as_in_torch(faulty: KernelLibrary, x: float) -> None:
    number, given_x = faulty.functions.wr_test_number, torch.tensor(x, dtype=torch.float32)
    for to, dtype in enumerate((torch.bfloat16, torch.float16, torch.float8_e4m3fn)):
        if dtype == torch.float8_e4m3fn and abs(x) > 448:
            given_x = given_x.clamp(-448, 448)  # torch gives NaN beyond, the kernels saturate
        bytes_of = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
        wanted = int(given_x.to(dtype).view(bytes_of)) & (0xFF if dtype.itemsize == 1 else 0xFFFF)
        got = number(ctypes.c_uint32(bits_of(x)), to)
        if math.isnan(x):
            got, wanted = got & 0x7F, 0x7F  # any NaN of any sign
        assert got == wanted, (x, dtype)


@pytest.mark.parametrize(
    ("to", "dtype"), [(3, torch.bfloat16), (4, torch.float16), (5, torch.float8_e4m3fn)]
)
def test_widening_is_exact(faulty: KernelLibrary, to: int, dtype: torch.dtype) -> None:
    number = faulty.functions.wr_test_number
    count, whole = (256, torch.uint8) if dtype.itemsize == 1 else (1 << 16, torch.int32)
    every = torch.arange(count, dtype=whole)
    wanted = (every if dtype.itemsize == 1 else every.to(torch.int16)).view(dtype).float()
    got = torch.tensor(
        [number(ctypes.c_uint32(bits), to) for bits in range(count)], dtype=torch.int32
    ).view(torch.float32)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got[~got.isnan()], wanted[~wanted.isnan()])


@pytest.mark.parametrize("fault", [10, 11])
def test_the_emulator_reports_writes_over_data_that_is_being_read(
    faulty: KernelLibrary, fault: int
) -> None:
    said = set()
    for seed in SEEDS:
        with pytest.raises(LaunchError, match="with no barrier since") as failed:
            reverse(faulty, fault, seed)
        said.add("others read" in str(failed.value))
    assert said == {False, True}, "by the order, the read or the write is the one too early"


def test_a_changed_header_rebuilds_only_the_objects_that_include_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "deep.h").write_text("int deep;\n")
    (tmp_path / "near.cuh").write_text('  #include "parts/deep.h"\n#include <vector>\n')
    (folder / "one.cu").write_text('#include "near.cuh"\n')
    (tmp_path / "two.cu").write_text("int two;\n")
    before = build.objects(build.EMULATOR)
    (folder / "deep.h").write_text("int deeper;\n")
    after = build.objects(build.EMULATOR)
    changed = {source.name for source in before if before[source] != after[source]}
    assert changed == {"one.cu"}
