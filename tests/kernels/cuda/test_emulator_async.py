"""Tests that the emulator's copy engine, mbarriers and warpgroup products are right and strict."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from kvkernels.cuda.library import KernelLibrary, LaunchError
from tests.kernels.emulated import emulator_beside, needs_compiler

pytestmark = needs_compiler
SOURCE = Path(__file__).with_name("emulator_async_faults.cu")
SEEDS = range(1, 7)
ROWS, KEYS, DIM = 64, 3 * 128 - 28, 64


def faults() -> dict[str, int]:
    """Return the numbers of the faults that the kernel can have, by their names in the source."""
    names = re.search(r"enum Fault \{(.*?)\}", SOURCE.read_text(), re.DOTALL)
    assert names
    return {name: number for number, name in enumerate(re.findall(r"\w+", names[1]))}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    """Return the emulator with the kernels of `emulator_async_faults.cu` instead of ours."""
    return emulator_beside(SOURCE, tmp_path_factory.mktemp("faults"))


def is_right(library: KernelLibrary, fault: str, seed: int) -> bool:
    """Run the kernel with a fault; return whether its products of small whole numbers are exact."""
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(-2, 3, (n, DIM), generator=draw).bfloat16() for n in (ROWS, KEYS))
    out = torch.full((ROWS, DIM), float("nan"))
    library.functions.wr_emulator_seed(ctypes.c_uint64(seed))
    library.call("test_boxes", (x, y, out, faults()[fault]))
    return torch.equal(out.double(), (x.double() @ y.double().T) @ y.double())


def test_correct_code_is_right_in_every_order_of_fibers(faulty: KernelLibrary) -> None:
    assert all(is_right(faulty, "SOUND", seed) for seed in SEEDS)


@pytest.mark.parametrize(
    "fault", ["READ_EARLY", "SHALLOW_STRIDE", "NO_EMPTY_WAIT", "TOO_FEW_BYTES"]
)
def test_unreported_faults_give_wrong_results(faulty: KernelLibrary, fault: str) -> None:
    found = False
    for seed in SEEDS:
        try:
            found = found or not is_right(faulty, fault, seed)
        except LaunchError:
            found = True
    assert found


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("NO_FULL_WAIT", "has not waited for: the mbarrier at offset"),
        ("ORDINARY_LOAD", "of what was not waited for: the mbarrier at offset"),
        ("LEFT_EARLY", "that a product in flight reads"),
        ("OTHER_WARP_LEFT", "that a product in flight reads"),
        ("ACCUMULATOR_WRITTEN", "an accumulator was written before its product was waited for"),
        ("OPERAND_CHANGED", "a left operand in registers was changed before"),
        ("NOT_BEGUN", "a product without begin_products since the last wait"),
        ("NO_FENCE", "was stored with no fence_async since"),
        ("NO_BARRIER_AFTER_STORE", "was stored with no barrier since"),
        ("STORED_OVER", "that a product in flight reads"),
        ("TOO_MANY_BYTES", "deadlock in CTA 0, 0: threads 0-127 are at the mbarrier at"),
        ("NOT_MADE", "of an mbarrier at offset 24592 that was not made"),
        ("NO_INIT_FENCE", "made with no fence_async since"),
        ("MADE_LATE", "which another thread made with no barrier since"),
        ("UNALIGNED", "not at a multiple of 128"),
        ("BEYOND_SHARED", "shared bytes, not at a multiple of 128"),
        ("NOT_WAITED_FOR", "a CTA ended with box copies that nobody waited for"),
    ],
)
def test_the_emulator_reports_faults(faulty: KernelLibrary, fault: str, says: str) -> None:
    """Each fault is reported by name for at least one order of fibers; under other orders the
    kernel may also give a right or a wrong result.
    """
    said = []
    for seed in SEEDS:
        try:
            is_right(faulty, fault, seed)
        except LaunchError as error:
            said.append(str(error))
    assert any(says in text for text in said), said
    assert is_right(faulty, "SOUND", 1), "the next launch is none the worse"
