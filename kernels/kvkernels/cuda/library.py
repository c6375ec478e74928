"""Builds, finds and loads the shared library of the kernels, and calls it through its C ABI.

`python -m kvkernels.cuda.library [debug | emulator]` builds it. With `debug`, also for a GPU, a
wait on the device that takes seconds ends as a failed launch, not as a hang. Each source becomes an
object named by a hash of it, its headers and the flags, so that a build compiles only changed
sources, and a library found under its name is never stale. The compiler's report on registers and
spills is in a file next to each object. An entry point takes views (`wr_tensor` of
`kernels/cuda/abi.h`), then a stream, checks everything that the host can know, and launches the
kernel. It returns 0, or 1 for refused arguments, or 2 for a failed launch.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

MAX_DIMS = 5
DTYPES = {
    name: code
    for code, name in enumerate(
        ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "int32", "int64")
    )
}
REFUSED = 1


class RefusedError(ValueError):
    """Raised for arguments that a kernel does not support; the text begins with the argument's
    name.
    """


class LaunchError(RuntimeError):
    """Raised if a kernel could not be launched, or an earlier kernel on the device failed."""


class TensorLike(Protocol):
    """The part of a torch tensor's interface that this module uses, so that it needs no torch."""

    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def is_cuda(self) -> bool: ...
    def stride(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...


# `wr_tensor`: data, shape and stride in elements, dims, dtype, on_cuda, reserved.
VIEW = struct.Struct(f"@Q{MAX_DIMS}q{MAX_DIMS}q4i")
PADDING = tuple((0,) * (MAX_DIMS - dims) for dims in range(MAX_DIMS + 1))


@cache
def _code_of(dtype: Any) -> int | None:
    return DTYPES.get(str(dtype).removeprefix("torch."))


def view_of(tensor: TensorLike) -> bytes:
    """Return the C struct `wr_tensor` that describes `tensor`; it is valid as long as the tensor's
    memory. Raises RefusedError for a dtype or rank that the C ABI does not have.
    """
    shape, code = tensor.shape, _code_of(tensor.dtype)
    dims = len(shape)
    if code is None or dims > MAX_DIMS:
        raise RefusedError(
            f"a tensor of {str(tensor.dtype).removeprefix('torch.')} with {dims} dimensions: "
            f"kernels take {', '.join(DTYPES)} with up to {MAX_DIMS}"
        )
    pad = PADDING[dims]
    where = (tensor.data_ptr(), *shape, *pad, *tensor.stride(), *pad)
    return VIEW.pack(*where, dims, code, tensor.is_cuda, 0)


class KeptViews:
    """Keeps the views of tensors while the tensors live. Lifetime: process; calls from any thread.
    All layers use the same plan, tables and pages, and making a view takes ten times as long as
    looking it up. A tensor that gets other memory gets a new view; one whose shape is changed in
    place does not.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[TensorLike], int, bytes]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, tensor: TensorLike) -> bytes:
        """Return the view of a tensor, as `view_of` does and with the same errors, and keep it."""
        key = id(tensor)
        kept = self._kept.get(key)
        if kept is not None and kept[0]() is tensor and kept[1] == tensor.data_ptr():
            return kept[2]
        view = view_of(tensor)
        self._kept[key] = weakref.ref(tensor, partial(self._forget, key)), tensor.data_ptr(), view
        return view

    def _forget(self, key: int, dead: weakref.ref[TensorLike]) -> None:
        kept = self._kept.get(key)
        if kept is not None and kept[0] is dead:  # and not another's that came to its place
            del self._kept[key]


Argument = TensorLike | float | int | None


class DeviceLimits(NamedTuple):
    """The limits of the current device, and of the library on it."""

    capability: int  # major * 10 + minor
    multiprocessors: int
    shared_bytes: int  # that a CTA can have
    driver: int  # CUDA's version, 1000 * major + 10 * minor
    runtime: int  # that the library was built with

    def __str__(self) -> str:
        return (
            f"compute capability {self.capability / 10:.1f}, {self.multiprocessors} SMs, "
            f"{self.shared_bytes} bytes of shared memory a CTA, CUDA {self.driver / 1000:.1f} by "
            f"the driver, {self.runtime / 1000:.1f} by the library"
        )


class KernelLibrary:
    """A loaded library of kernels. Lifetime: process; calls from any thread. Raises OSError for a
    file that is no library, LaunchError for one with another ABI.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._views = KeptViews()
        self.functions = ctypes.CDLL(str(path))
        self.functions.wr_last_error.restype = ctypes.c_char_p
        self.functions.wr_tensor_bytes.restype = ctypes.c_int64
        theirs, ours = self.functions.wr_tensor_bytes(), VIEW.size
        if theirs != ours:
            raise LaunchError(f"{path} has tensors of {theirs} bytes, not {ours}: build it anew")

    def device(self) -> DeviceLimits:
        """Return the limits of the current device. Raises RefusedError for a driver older than the
        library, LaunchError if there is no device.
        """
        found = (ctypes.c_int64 * len(DeviceLimits._fields))()
        self._raise(self.functions.wr_device(found), "device")
        return DeviceLimits(*found)

    def call(self, name: str, arguments: Sequence[Argument], stream: int = 0) -> None:
        """Launch the kernel `wr_<name>` on `stream` (a cudaStream_t), and return once it is
        launched. An argument of None is an absent tensor. Raises RefusedError before anything ran,
        or LaunchError.
        """
        function = getattr(self.functions, f"wr_{name}")
        given = [self._in_c(argument) for argument in arguments]
        self._raise(function(*given, ctypes.c_void_p(stream)), name)

    def _in_c(self, argument: Argument) -> Any:
        if argument is None:
            return ctypes.c_void_p(0)
        if isinstance(argument, int):
            return ctypes.c_int64(argument)
        if isinstance(argument, float):
            return ctypes.c_double(argument)
        return self._views.of(argument)  # bytes go as a pointer to them

    def _raise(self, code: int, name: str) -> None:
        if code:
            message = self.functions.wr_last_error().decode(errors="replace")
            raise (RefusedError if code == REFUSED else LaunchError)(f"{name}: {message}")


COMMON = ("-std=c++20", "-DNDEBUG")
LIBRARY_VARIABLE = "WARMROUTE_CUDA_LIBRARY"
COMPILE_TIMEOUT_S = 600
INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class BuildError(RuntimeError):
    """Raised if a compiler is missing, or rejects a source; the text says which and why."""


class Target(NamedTuple):
    """One kind of library, with the commands that compile and link it."""

    name: str
    compiler: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    sources: tuple[str, ...]  # patterns


CUDA = Target(
    "cuda",
    "nvcc",
    (
        *(*COMMON, "-O3", "-lineinfo", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
        *("-gencode", "arch=compute_80,code=[sm_80,compute_80]"),
        *("-gencode", "arch=compute_90a,code=sm_90a"),
    ),
    ("-shared", "-cudart", "static"),
    ("**/*.cu",),
)
# A wait tries again each microsecond or less often; none that is right tries for long.
DEBUG = CUDA._replace(name="debug", compile_flags=(*CUDA.compile_flags, "-DWR_SPIN_LIMIT=10000000"))
# Undefined behaviour ends the program; fibers need longjmp as it is, without glibc's guard.
EMULATOR = Target(
    "emulator",
    "g++",
    (
        *(*COMMON, "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"),
        *("-U_FORTIFY_SOURCE", "-ffp-contract=off"),
        *("-fsanitize=undefined", "-fno-sanitize-recover=all", "-x", "c++"),
    ),
    ("-shared", "-fsanitize=undefined"),
    ("**/*.cu", "emulator/*.cpp"),
)


def source_folder() -> Path:
    """Return the folder of the kernels' sources: in the checkout, or in the installed wheel."""
    beside = Path(__file__).parent / "sources"
    return beside if beside.is_dir() else Path(__file__).resolve().parents[2] / "cuda"


def cache_folder() -> Path:
    """Return `build/kernels` of a checkout, or the user's cache folder for an installation."""
    root = Path(__file__).resolve().parents[3]
    if (root / "pyproject.toml").is_file():
        return root / "build" / "kernels"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "warmroute" / "kernels"


def find_cuda() -> Path | None:
    """Return the library for GPUs: the one named by WARMROUTE_CUDA_LIBRARY, or one built of these
    sources; None if there is none.

    Raises BuildError for a variable that names no file.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise BuildError(f"{LIBRARY_VARIABLE}={named} is no file")
        return Path(named)
    path = library_path(CUDA)
    return path if path.is_file() else None


def objects(target: Target) -> dict[Path, Path]:
    """Return the object file that each source of `target` is compiled to, by source."""
    folder = source_folder()
    files = (path for path in folder.rglob("*.*") if path.is_file())
    texts = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    named = {}
    for source in sorted(path for glob in target.sources for path in folder.glob(glob)):
        digest = hashlib.sha256(repr(target).encode())
        for name in sorted(_read_with(source.relative_to(folder).as_posix(), texts)):
            digest.update(texts[name])
        name = f"{source.stem}-{digest.hexdigest()[:16]}.o"
        named[source] = cache_folder() / target.name / name
    return named


def _read_with(source: str, texts: Mapping[str, bytes]) -> set[str]:
    """Return the names of a source and of all headers of this project that it includes, directly or
    not, below the source folder.
    """
    found, left = set(), [source]
    while left:
        name = left.pop()
        if name in texts and name not in found:
            found.add(name)
            left += [included.decode() for included in INCLUDE.findall(texts[name])]
    return found


def library_path(target: Target) -> Path:
    """Return the path at which `build` puts the library of the current sources."""
    names = "".join(path.name for path in objects(target).values())
    digest = hashlib.sha256(names.encode()).hexdigest()[:16]
    return cache_folder() / target.name / f"libwarmroute-{digest}.so"


def compiler_log(built: Path) -> str:
    """Return the compiler's output for the object `built`."""
    return built.with_suffix(".log").read_text()


def build(target: Target = CUDA) -> Path:
    """Return the path of the library, and build it if it does not exist. Raises BuildError if that
    fails. If several processes build the same library, one of them does it and the others wait.
    """
    path = library_path(target)
    if path.is_file():
        return path
    compiler = shutil.which(target.compiler)
    if compiler is None:
        raise BuildError(
            f"{target.compiler} is not on PATH, and {path} is not built: install it, or name a "
            f"library that was built elsewhere by {LIBRARY_VARIABLE}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    made = objects(target)
    with _lock(path.parent / "lock"):
        if path.is_file():
            return path
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            jobs = [pool.submit(_compile, target, compiler, *pair) for pair in made.items()]
            for job in jobs:
                job.result()
        _run([compiler, *target.link_flags, *map(str, made.values())], path)
    return path


def _compile(target: Target, compiler: str, source: Path, made: Path) -> None:
    if made.is_file():
        return
    made.with_suffix(".log").write_text(
        _run([compiler, *target.compile_flags, f"-I{source_folder()}", "-c", str(source)], made)
    )


def _run(command: list[str], out: Path) -> str:
    """Run a compiler, and return its output; `out` appears completely or not at all."""
    partial = out.with_suffix(f".{os.getpid()}{out.suffix}")
    try:
        done = subprocess.run(
            [*command, "-o", str(partial)],
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
        )
        if done.returncode:
            output = (done.stdout + done.stderr)[-4000:]
            raise BuildError(f"{' '.join(command[:1])} refused {command[-1]}:\n{output}")
        partial.replace(out)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {COMPILE_TIMEOUT_S} s") from error
    finally:
        partial.unlink(missing_ok=True)
    return done.stdout + done.stderr


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    targets = {"cuda": CUDA, "debug": DEBUG, "emulator": EMULATOR}
    if len(sys.argv) > 2 or (asked := (sys.argv[1:] or ["cuda"])[0]) not in targets:
        sys.exit(f"usage: python -m kvkernels.cuda.library [{' | '.join(targets)}]")
    print(build(targets[asked]))
