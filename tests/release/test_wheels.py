"""Tests that a wheel has only our files, and that it serves where only it is installed."""

from __future__ import annotations

import io
import platform
import re
import subprocess
import tarfile
import urllib.request
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from release import wheels
from tests.live.ports import lasting_port
from tests.release.bare import Bare, installed, until_router_is_ready

BUILD_S = 1_500  # for what takes two minutes on a quiet machine with nothing built
PACKAGES = ("router", "engine", "policies", "simulator", "kernels/kvkernels")
ASK = """
import sys, kvkernels, kvkernels._native, router.cli.main, simulator.cli.replay
from kvkernels.cuda import library
assert "torch" not in sys.modules, "torch is imported"
print(kvkernels._native.__file__)
"""


def ours(*folders: str) -> set[str]:
    """Return the files below these folders that git tracks or would add."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    done = subprocess.run(listed, cwd=wheels.ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout: nothing says which files are ours")
    return {name for name in done.stdout.splitlines() if (wheels.ROOT / name).is_file()}


@pytest.mark.timeout(BUILD_S)
def test_a_wheel_has_all_files_of_the_packages_and_no_others(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    held = {name for name in held if ".dist-info/" not in name}
    native = {name for name in held if name.endswith(".so")}
    sources = {
        name.replace("kernels/cuda/", "kvkernels/cuda/sources/", 1) for name in ours("kernels/cuda")
    }
    modules = {name.removeprefix("kernels/") for name in ours(*PACKAGES)}
    assert len(native) == 1
    assert held - native == sources | modules


def native(wheel: Path) -> tuple[str, str, set[int]]:
    """Return the name, the processor and the required glibc versions 2.N of a wheel's native
    module.
    """
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".so"))
        elf = ELFFile(io.BytesIO(packed.read(name)))
    needs = elf.get_section_by_name(".gnu.version_r")
    versions = [one.name for _, auxiliary in needs.iter_versions() for one in auxiliary]
    found = {int(one.removeprefix("GLIBC_2.").split(".")[0]) for one in versions}
    return name.rpartition("/")[2], elf.get_machine_arch(), found


@pytest.mark.full  # `make wheel` compiles all by zig, for minutes each
@pytest.mark.timeout(8 * BUILD_S)
def test_release_wheels_are_small_and_run_on_other_machines(tmp_path: Path) -> None:
    """The wheels of a release are small and run on other machines: the test checks all wheels that
    `make wheel` makes here, and installs and runs those for this processor.
    """
    for python in wheels.pythons([])[0]:
        for arch, machine in (("x86_64", "x64"), ("aarch64", "AArch64")):
            made = wheels.build_wheel(python, arch, tmp_path / "dist")
            assert made.stat().st_size <= wheels.MAX_BYTES
            suffix = "abi3" if python.stable else f"cpython-3{python.minor}-{arch}-linux-gnu"
            name, processor, glibc = native(made)
            assert (name, processor) == (f"_native.{suffix}.so", machine)
            assert max(glibc) <= 28
            if arch == platform.machine():
                bare = installed(made, tmp_path / python.tag, python=python.path)
                assert re.fullmatch(r"warmroute \d[\w.]*\n", bare.run("warmroute", "--version"))
                assert bare.run("python", "-c", ASK).strip().endswith(name)


@pytest.mark.timeout(BUILD_S)
def test_the_programs_of_a_wheel_run_without_a_checkout(bare: Bare) -> None:
    assert re.fullmatch(r"warmroute \d[\w.]*\n", bare.run("warmroute", "--version"))
    for program in ("warmroute", "warmroute-engine", "warmroute-sim"):
        assert program in bare.run(program, "--help")
    native = Path(bare.run("python", "-c", ASK).strip())
    assert native.is_relative_to(bare.root)
    assert (native.parent / "cuda" / "sources" / "abi.cu").is_file()


@pytest.mark.timeout(BUILD_S)
def test_a_wheel_routes_a_request_from_an_empty_folder(bare: Bare) -> None:
    admin = str(lasting_port())
    engine = ["warmroute-engine", "--timed", "llama-3.1-8b-h100", "--port", "0"]
    router = ["warmroute", "serve", "--port", "0", "--admin-port", admin, "--worker"]
    body = b'{"model": "warmroute-timed", "prompt": "Once upon a time", "max_tokens": 4}'
    with bare.running(*engine) as worker, bare.running(*router, worker) as url:
        until_router_is_ready(url)
        ask = urllib.request.Request(
            f"{url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(ask, timeout=60) as reply:
            assert reply.status == 200
            assert b'"choices"' in reply.read()
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=60) as reply:
            assert b"warmroute_relay" in reply.read(), "the native relay is in the wheel"
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/ui", timeout=60) as reply:
            assert b"<script" in reply.read()


@pytest.mark.timeout(BUILD_S)
def test_the_source_distribution_has_all_sources_of_a_wheel(tmp_path: Path) -> None:
    if find_spec("build") is None:
        pytest.skip("build is not installed: `make wheel` installs it")
    sdist = wheels.build_sdist(tmp_path)
    with tarfile.open(sdist) as packed:
        held = {member.name.partition("/")[2] for member in packed if member.isfile()}
    needed = ours(*PACKAGES, "kernels/src", "kernels/cuda", "kernels/CMakeLists.txt", "docs")
    assert needed | {"pyproject.toml", "README.md", "LICENSE"} <= held
    assert not {name for name in held if re.match(r"tests/|kernels/tests/|build/|dist/|\.", name)}
    assert not {name for name in held if name.endswith((".so", ".pyc", ".o"))}
