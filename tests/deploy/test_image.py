"""Tests that the steps of docs/deploy/Dockerfile, run in clean folders, make a router that serves.

No image builder is needed: each stage is a folder with its own environment, `COPY` copies, and each
`RUN` runs except commands that change the system (apt-get, useradd), which are only compared.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
import venv
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from release.image import USER
from tests.deploy.parsed import DEPLOY
from tests.live.ports import lasting_port

ROOT = DEPLOY.parents[1]
PLAIN = DEPLOY / "kubernetes"
BUILD_S = 1_200  # for steps that take three minutes on a quiet machine


@dataclass
class Stage:
    """A folder that stands for an image's root. Lifetime: test."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    command: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)  # of Debian
    users: dict[str, str] = field(default_factory=dict)  # ids by name

    @property
    def bin(self) -> Path:
        return self.root / "usr" / "bin"

    def here(self, text: str) -> str:
        """Return an argument with its absolute paths moved below the stage's root."""
        return re.sub(r"^(?=/)", str(self.root), text)

    def copy(self, arguments: list[str], source: Path) -> None:
        *names, to = arguments
        target = Path(self.here(to))
        for name in names:
            what = source / name.lstrip("/")
            if what.is_dir():
                keep = shutil.ignore_patterns("__pycache__", "*.so", "build")
                shutil.copytree(what, target, ignore=keep, dirs_exist_ok=True)
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy2(what, target)

    def run(self, line: str) -> None:
        for command in line.split("&&"):
            match shlex.split(command):
                case ["apt-get", "update"]:
                    pass
                case ["apt-get", "install", *arguments]:
                    self.packages += [one for one in arguments if not one.startswith("-")]
                case ["useradd", "--system", "--uid", number, name]:
                    self.users[name] = number
                case ["rm", "-r", path]:
                    shutil.rmtree(self.here(path))
                case ["pip", *arguments]:
                    self._pip([self.here(one) for one in arguments])
                case unknown:
                    pytest.fail(f"this test does not know how to run {unknown}")

    def _pip(self, arguments: list[str]) -> None:
        command = [str(self.bin / "python"), "-m", "pip", *arguments]
        done = subprocess.run(
            command, cwd=self.root, text=True, capture_output=True, timeout=BUILD_S
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text)).splitlines()
    parted = (line.partition(" ") for line in lines if line.strip())
    return [(word, rest.strip()) for word, _, rest in parted]


def stages(folder: Path) -> list[Stage]:
    """Build all stages in order and return them; the last one is the image."""
    found: dict[str, Stage] = {}
    stage = Stage(folder)
    for word, rest in instructions():
        match word:
            case "ARG":
                assert rest == "BASE=python:3.11-slim"
            case "FROM":
                name = rest.partition(" AS ")[2] or "image"
                stage = found[name] = Stage(folder / name)
                venv.create(stage.root / "usr", with_pip=True)
            case "COPY":
                arguments = rest.split()
                whence = arguments[0].partition("--from=")[2]
                stage.copy(arguments[bool(whence) :], found[whence].root if whence else ROOT)
            case "RUN":
                stage.run(rest)
            case "USER":
                stage.user = rest
            case "ENV":
                stage.environ |= dict(one.split("=", 1) for one in shlex.split(rest))
            case "ENTRYPOINT" | "CMD":
                stage.command += json.loads(rest)
            case _:
                assert word in ("EXPOSE", "STOPSIGNAL", "LABEL", "HEALTHCHECK")
    return list(found.values())


def test_the_dockerfile_copies_the_sources_of_the_package() -> None:
    copied = {
        name
        for word, rest in instructions()
        if word == "COPY" and "--from" not in rest
        for name in rest.split()[:-1]
    }
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "constraints.txt", "router", "engine", "policies"} <= copied
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    uid = dict(instructions())["USER"]
    assert int(uid) == USER
    for name in ("central", "sidecar", "picker"):
        for one in yaml.safe_load_all((PLAIN / f"{name}.yaml").read_text(encoding="utf-8")):
            if one["kind"] == "Deployment" and "redis" not in one["metadata"]["name"]:
                pod = one["spec"]["template"]["spec"]
                assert pod["securityContext"]["runAsUser"] == int(uid)


@pytest.mark.full  # `make image` is tried in `make test-live`
@pytest.mark.timeout(2 * BUILD_S)
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the image has Python 3.11")
def test_the_dockerfiles_steps_make_a_router_that_serves(tmp_path) -> None:
    build, image = stages(tmp_path)
    assert build.packages == ["g++"]
    assert shutil.which("g++"), "a C++ compiler, as Debian's package has it"
    assert image.users == {"warmroute": image.user}
    assert not (image.root / "wheels").exists()
    assert not (image.root / "src").exists()
    python = image.bin / "python"
    asked = "import importlib.util as i, sys; print([i.find_spec(n) is None for n in sys.argv[1:]])"
    absent = ["torch", "matplotlib", "nanobind"]
    present = ["grpc", "kubernetes_asyncio", "opentelemetry", "kvkernels"]
    said = subprocess.check_output([python, "-c", asked, *absent, *present], text=True, cwd="/")
    assert said == f"{[True] * 3 + [False] * 4}\n"
    size = sum(
        f.stat().st_size for f in image.root.rglob("*") if f.is_file() and not f.is_symlink()
    )
    print(f"what the image adds to its base: {size / 1e6:.0f} MB")

    config = Path(image.here(image.environ["WARMROUTE_CONFIG"]))
    config.parent.mkdir(parents=True)
    config.write_text("workers: [http://127.0.0.1:9]\n", encoding="utf-8")
    port, admin = lasting_port(), lasting_port()
    environ = {
        "PATH": f"{image.bin}:/usr/bin:/bin",
        "HOME": "/nonexistent",
        **image.environ,
        "WARMROUTE_HOST": "127.0.0.1",
        "WARMROUTE_CONFIG": str(config),
        "WARMROUTE_PORT": str(port),
        "WARMROUTE_ADMIN_PORT": str(admin),
    }
    assert image.environ["WARMROUTE_HOST"] == "0.0.0.0"
    program, *arguments = image.command
    router = subprocess.Popen(
        [image.bin / program, *arguments], env=environ, cwd="/", text=True, stdout=subprocess.PIPE
    )
    try:
        assert router.stdout is not None
        assert router.stdout.readline().startswith(f"ready http://127.0.0.1:{port}")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            assert reply.status == 200
        probe = urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=5)
        assert b"warmroute_relay" in probe.read(), "the native relay is in the wheel"
    finally:
        router.terminate()
        assert router.wait(30) == 0
