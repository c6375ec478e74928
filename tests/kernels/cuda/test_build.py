"""Tests of the code that nvcc makes of the kernels for both GPUs: no spills, registers within
bounds, and the instructions that the design needs.

The library is built once for all tests, and again only where sources changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from kvkernels.cuda import library as build
from kvkernels.cuda.library import (
    KeptViews,
    KernelLibrary,
    LaunchError,
    RefusedError,
    view_of,
)
from tests.kernels.cuda import append_cases as append

needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")
GPUS = ("sm_80", "sm_90a")


class Bounds(NamedTuple):
    """The registers that a kernel may use and the instructions that it must have, on the GPUs it is
    for.
    """

    registers: int
    instructions: tuple[str, ...] = ()  # regular expressions
    gpus: tuple[str, ...] = GPUS


MMA, ASYNC_COPY = r"HMMA\.16816\.F32", r"LDGSTS\.E\.(BYPASS\.)?(LTC128B\.)?128"
WIDENED = r"STS\.128"

# Warpgroup products, copies by tensor map, mbarriers; then the registers taken and given: 224, 56.
HOPPER = (
    *(r"HGMMA\.64x128x16\.F32", r"UTMALDG\.4D", r"UTMACCTL\.PF"),
    *(r"SYNCS\.PHASECHK", r"SYNCS\.ARRIVE"),
)
SHARES = (r"USETMAXREG\.TRY_ALLOC\.CTAPOOL UP0, 0xe0 ", r"USETMAXREG\.DEALLOC\.CTAPOOL 0x38 ")
# The registers where the producers widen bytes: 216 and 72.
WIDENING_SHARES = (
    *(r"USETMAXREG\.TRY_ALLOC\.CTAPOOL UP0, 0xd8 ", r"USETMAXREG\.DEALLOC\.CTAPOOL 0x48 "),
    *(r"LDG\.E\.NA\.128", WIDENED),
)

# Bounds by source; the registers are those that the launch bounds' CTAs per SM allow.
KERNELS = {
    "append": Bounds(64, (r"LDG\.E\.128", r"STG\.E\.128", r"SHFL\.BFLY|SHFL\.IDX")),
    "w8a16": Bounds(180, (MMA, r"LDS\.128", ASYNC_COPY)),
    "shared_decode": Bounds(255, (MMA, r"LDSM\.16\.M88\.4", r"LDSM\.16\.MT88\.4", ASYNC_COPY)),
    "shared_decode_quantized": Bounds(
        255, (MMA, r"LDSM\.16\.M88\.4", r"LDSM\.16\.MT88\.4", r"LDS\.128", WIDENED, ASYNC_COPY)
    ),
    "copy_runs": Bounds(32, (r"LDG\.E\.(\w+\.)*128", r"STG\.E\.128")),
    "prefill": Bounds(255, (MMA, r"LDSM\.16\.M88\.4", r"LDSM\.16\.MT88\.4", ASYNC_COPY)),
    "prefill_wgmma": Bounds(168, (*HOPPER, *SHARES), ("sm_90a",)),
    "prefill_wgmma_quantized": Bounds(168, (*HOPPER, *WIDENING_SHARES), ("sm_90a",)),
    "prefill_quantized": Bounds(
        255, (MMA, r"LDSM\.16\.M88\.4", r"LDSM\.16\.MT88\.4", r"LDS\.64", WIDENED, ASYNC_COPY)
    ),
}


WAITS = """
#include "bulk.cuh"
__global__ void waits(int* out) {
    __shared__ wr::Mbarrier barrier;
    if (threadIdx.x == 0) wr::init_mbarrier(&barrier, 1);
    __syncthreads();
    wr::wait_phase(&barrier, 0);
    *out = 1;
}
"""


class Compiled(NamedTuple):
    kernel: str
    gpu: str
    registers: int
    spilled_bytes: int
    stack_bytes: int


@cache
def built() -> dict[str, Path]:
    """Build the library; return the object file of each source."""
    build.build(build.CUDA)
    return {source.stem: made for source, made in build.objects(build.CUDA).items()}


def compiled(log: str) -> list[Compiled]:
    """Return the figures of each kernel of one source, read from the log of `ptxas -v`."""
    found = re.findall(
        r"Compiling entry function '(\S+)' for '(\S+)'.*?(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    return [
        Compiled(kernel, gpu, int(registers), int(stores) + int(loads), int(stack))
        for kernel, gpu, stack, stores, loads, registers in found
    ]


@needs_nvcc
def test_the_built_library_can_be_called() -> None:
    library = KernelLibrary(build.build(build.CUDA))
    with pytest.raises(RefusedError, match="append: q and k need"):
        library.call("append", [None] * 9 + [1e-6] + [None] * 5)


class Pretended:
    """A tensor in host memory that claims to be on a GPU."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.stride, self.data_ptr = tensor.stride, tensor.data_ptr


@needs_nvcc
def test_a_failed_launch_raises_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU would run it")
    arguments = [
        Pretended(x) if isinstance(x, torch.Tensor) else x for x in append.case([0]).arguments()
    ]
    with pytest.raises(LaunchError, match=r"append: .*driver"):
        KernelLibrary(build.build(build.CUDA)).call("append", arguments)


@needs_nvcc
def test_every_source_with_kernels_has_bounds() -> None:
    with_kernels = {name for name, made in built().items() if compiled(build.compiler_log(made))}
    assert with_kernels == set(KERNELS)


@needs_nvcc
@pytest.mark.parametrize("source", KERNELS)
def test_kernels_stay_within_their_registers_and_do_not_spill(source: str) -> None:
    found = compiled(build.compiler_log(built()[source]))
    assert {one.gpu for one in found} == set(GPUS)
    for one in found:
        assert one.spilled_bytes == 0, one
        assert one.stack_bytes == 0, one
        assert one.registers <= KERNELS[source].registers, one


@cache
def disassembled(path: Path, gpu: str) -> str:
    """Return the machine code (SASS) of a built library for one GPU architecture, as text."""
    tools = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
    if not (tools / "cuobjdump").is_file():
        pytest.skip("nvidia-cuda-cuobjdump is not installed")
    said = subprocess.run(
        [tools / "cuobjdump", "-sass", "-arch", gpu, path],
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return said.stdout


@needs_nvcc
@pytest.mark.parametrize(
    ("source", "gpu"), [(name, gpu) for name, bounds in KERNELS.items() for gpu in bounds.gpus]
)
def test_kernels_have_the_expected_instructions(source: str, gpu: str) -> None:
    said = disassembled(built()[source], gpu)
    own = f"{len(source)}{source}6kernel"  # mangled; others are parts that it includes
    functions = [text for text in said.split("Function : ")[1:] if own in text[:200]]
    assert functions
    for function in functions:
        name = function.partition("\n")[0]
        for wanted in KERNELS[source].instructions:
            assert re.search(wanted, function), f"{name} has no {wanted}"
        assert not re.search(r"\b(LDL|STL)\b", function), f"{name} uses local memory"


def kernels_in(source: str, gpu: str, name: str) -> list[str]:
    """Return the machine code of each kernel of a source whose mangled name contains `name`."""
    functions = disassembled(built()[source], gpu).split("Function : ")[1:]
    return [text for text in functions if name in text.partition("\n")[0]]


@needs_nvcc
@pytest.mark.parametrize("source", ["shared_decode", "prefill"])
def test_merge_waits_before_exiting_or_reading_partial_results(source: str) -> None:
    merges = kernels_in(source, "sm_90a", "5merge6kernel")
    assert len(merges) == 4
    for merge in merges:
        before, wait, after = merge.partition("ACQBULK")
        assert wait
        assert len(re.findall(r"\bLDG\.", before)) == 3, "begin, end and a slot"
        assert not re.search(r"\b(EXIT|BRA|STG)\b", before)
        assert re.search(r"\bLDG\.", after)
        assert "CONSTANT" not in merge, "reads that need not see what the kernel before wrote"
    for merge in kernels_in(source, "sm_80", "5merge6kernel"):
        assert "ACQBULK" not in merge


@needs_nvcc
@pytest.mark.parametrize(
    ("source", "dependents"),
    [
        ("shared_decode", 1.0),
        ("shared_decode_quantized", 1.0),
        ("prefill", 0.5),  # the kernel that cuts keys
        ("prefill_quantized", 0.5),
    ],
)
def test_kernels_before_merge_trigger_its_launch(source: str, dependents: float) -> None:
    for gpu, share in (("sm_90a", dependents), ("sm_80", 0.0)):
        found = ["PREEXIT" in text for text in kernels_in(source, gpu, f"{source}6kernel")]
        assert found
        assert sum(found) == share * len(found)


@needs_nvcc
@pytest.mark.parametrize("source", ["prefill_wgmma", "prefill_wgmma_quantized"])
def test_warpgroup_products_are_not_serialized(source: str) -> None:
    """ptxas does not serialize warpgroup products (warning C7510 and its neighbours) and does not
    ignore setmaxnreg (C7508).
    """
    said = build.compiler_log(built()[source])
    assert "Compiling entry function" in said
    assert not re.search(r"C75\d\d|serializ|setmaxnreg", said), said


@needs_nvcc
def test_only_the_debug_library_ends_a_wait_that_hangs(tmp_path: Path) -> None:
    """Only the debug library traps when a wait hangs. The test compiles a kernel of one wait,
    because the library's kernels take half a minute each.
    """
    source = tmp_path / "waits.cu"
    source.write_text(WAITS)
    compiler = shutil.which("nvcc")
    assert compiler is not None
    for target, traps in ((build.DEBUG, True), (build.CUDA, False)):
        # Only Hopper has these waits, so leave out `-gencode` for sm_80.
        at = next(n for n, flag in enumerate(target.compile_flags) if "sm_80" in flag)
        own = target.compile_flags[: at - 1] + target.compile_flags[at + 1 :]
        made = tmp_path / f"{target.name}.o"
        build._compile(target._replace(compile_flags=own), compiler, source, made)
        assert ("BPT.TRAP" in disassembled(made, "sm_90a")) is traps


@needs_nvcc
@pytest.mark.full
def test_kernels_of_the_debug_library_spill_nothing() -> None:
    debug = {source.stem: (source, made) for source, made in build.objects(build.DEBUG).items()}
    source, made = debug["prefill_wgmma"]
    compiler = shutil.which("nvcc")
    assert compiler is not None
    made.parent.mkdir(parents=True, exist_ok=True)
    build._compile(build.DEBUG, compiler, source, made)
    assert "BPT.TRAP" in disassembled(made, "sm_90a")
    assert "BPT.TRAP" not in disassembled(built()["prefill_wgmma"], "sm_90a")
    assert {one.spilled_bytes for one in compiled(build.compiler_log(made))} == {0}


def test_the_error_names_a_missing_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    with pytest.raises(build.BuildError, match="nvcc is not on PATH"):
        build.build(build.CUDA)
    assert build.find_cuda() is None


def test_the_error_includes_the_compilers_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    (tmp_path / "bad.cu").write_text("int main() { return nothing; }")
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "cache")
    with pytest.raises(build.BuildError, match=r"(?s)refused .*bad.cu.*nothing"):
        build.build(build.EMULATOR)
    assert not list((tmp_path / "cache").rglob("*.o"))


def test_the_library_variable_selects_a_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named = tmp_path / "mine.so"
    monkeypatch.setenv(build.LIBRARY_VARIABLE, str(named))
    with pytest.raises(build.BuildError, match="is no file"):
        build.find_cuda()
    named.touch()
    assert build.find_cuda() == named


def test_unsupported_tensors_are_refused() -> None:
    with pytest.raises(RefusedError, match="a tensor of complex64 with 1 dimensions"):
        view_of(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(RefusedError, match="with 6 dimensions"):
        view_of(torch.zeros(1, 1, 1, 1, 1, 1))


def test_views_are_kept_while_their_tensors_live() -> None:
    kept, x = KeptViews(), torch.arange(6.0).view(2, 3)
    assert kept.of(x) == view_of(x)
    assert kept.of(x) is kept.of(x)
    turned = x.t()
    assert kept.of(turned) == view_of(turned) != kept.of(x)
    x.set_(torch.ones(2, 3))  # type: ignore[no-untyped-call]
    assert kept.of(x) == view_of(x) != kept.of(turned)
    del x, turned
    for _ in range(100):
        kept.of(torch.zeros(1))  # at the address of the tensor before
    assert len(kept) == 0
    with pytest.raises(RefusedError, match="complex64"):
        kept.of(torch.zeros(2, dtype=torch.complex64))
