"""Tests that `make image` makes an OCI archive that other programs can read, and that a router
serves from it.

The root is read-only and the user has no rights. There is no container runtime: programs run with
`unshare` and `chroot`, as close to a container as these can show.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from release import image, wheels
from tests.live.ports import lasting_port
from tests.release.bare import said_by, until_router_is_ready

BUILD_S = 1_500  # for what takes three minutes on a quiet machine without a built wheel
NEEDS = ("apt-get", "dpkg-deb", "unshare", "chroot", "mount")
MOUNTS = """
set -e
mount --bind "$0" "$0"
mount -o remount,ro,bind "$0"
mount -t proc proc "$0/proc"
mount --bind /dev "$0/dev"
chroot=$(command -v chroot)
exec env -i "${ENVIRON[@]}" "$chroot" --userspec="$USERSPEC" "$0" "$@"
"""

pytestmark = pytest.mark.timeout(BUILD_S)


@pytest.fixture(scope="module")
def archive(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    lacking = [name for name in NEEDS if shutil.which(name) is None]
    if lacking or os.getuid() != 0:
        pytest.skip(f"an image is made and run by root, with {', '.join(lacking or NEEDS)}")
    folder = tmp_path_factory.mktemp("image")
    made = folder / "warmroute.tar"
    image.make(wheel, made)
    return made


class Unpacked:
    """An unpacked archive of an image, as a container runtime unpacks it. Lifetime: module."""

    def __init__(self, archive: Path, folder: Path) -> None:
        self.blobs = folder / "layout"
        self.root = folder / "root"
        with tarfile.open(archive) as packed:
            packed.extractall(self.blobs, filter="data")
        index = json.loads((self.blobs / "index.json").read_bytes())
        (self.named,) = index["manifests"]
        self.manifest = self.json(self.named)
        self.config = self.json(self.manifest["config"])
        for one in self.manifest["layers"]:
            with tarfile.open(self.path(one)) as packed:
                packed.extractall(self.root, filter="tar")

    def path(self, blob: dict[str, Any]) -> Path:
        return self.blobs / "blobs" / blob["digest"].replace(":", "/")

    def json(self, blob: dict[str, Any]) -> Any:
        return json.loads(self.path(blob).read_bytes())

    def command(self, *arguments: str) -> list[str]:
        """Return a command that runs in the image with its environment, its user and a read-only
        root.
        """
        told = self.config["config"]
        words = " ".join(f"'{word}'" for word in told["Env"])
        script = f"ENVIRON=({words}); USERSPEC={told['User']}\n{MOUNTS}"
        return ["unshare", "--mount", "bash", "-c", script, str(self.root), *arguments]

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            self.command(*arguments),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def unpacked(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Unpacked:
    return Unpacked(archive, tmp_path_factory.mktemp("unpacked"))


def test_each_blob_has_the_size_and_digest_of_the_manifest(unpacked: Unpacked) -> None:
    blobs = [unpacked.named, unpacked.manifest["config"], *unpacked.manifest["layers"]]
    for blob in blobs:
        content = unpacked.path(blob).read_bytes()
        assert blob["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert blob["size"] == len(content)
    there = {path.name for path in (unpacked.blobs / "blobs" / "sha256").iterdir()}
    assert there == {blob["digest"].removeprefix("sha256:") for blob in blobs}
    (old,) = json.loads((unpacked.blobs / "manifest.json").read_bytes())
    for name in (old["Config"], *old["Layers"]):
        assert (unpacked.blobs / name).is_file()


def test_the_image_has_labels_a_user_and_a_health_check(unpacked: Unpacked) -> None:
    config = unpacked.config["config"]
    assert config["User"] == "65532:65532"
    labels = {name.rpartition(".")[2] for name in config["Labels"]}
    assert {"title", "description", "version", "created", "licenses"} <= labels
    assert config["Healthcheck"]["Test"][0] == "CMD"
    assert config["StopSignal"] == "SIGTERM"


def test_all_files_belong_to_root_and_none_is_setuid(unpacked: Unpacked) -> None:
    for blob in unpacked.manifest["layers"]:
        with tarfile.open(unpacked.path(blob)) as packed:
            for member in packed:
                assert (member.uid, member.gid) == (0, 0), member.name
                assert member.issym() or member.mode & 0o6022 == 0, member.name
    for name in ("bin/sh", "usr/bin/apt-get", "usr/bin/dpkg"):
        assert not (unpacked.root / name).exists()


def test_the_image_is_small_and_lacks_no_library(unpacked: Unpacked) -> None:
    files = [p for p in unpacked.root.rglob("*") if p.is_file() and not p.is_symlink()]
    assert sum(path.stat().st_size for path in files) <= image.MAX_BYTES
    assert image.missing_libraries(unpacked.root) == []


def test_the_images_programs_print_their_help_and_cannot_write(unpacked: Unpacked) -> None:
    for program in ("warmroute", "warmroute-engine", "warmroute-sim"):
        assert program in unpacked.run(program, "--help")
    tried = "import os; print(os.getuid()); open('/var/anything', 'w')"
    done = subprocess.run(
        unpacked.command("python3", "-c", tried), text=True, capture_output=True, timeout=240
    )
    assert done.stdout == "65532\n"
    assert "Read-only file system" in done.stderr


def test_the_images_extras_are_installed(unpacked: Unpacked) -> None:
    unpacked.run(
        "python3", "-c", "import grpc, kubernetes_asyncio, opentelemetry.sdk, ssl, sqlite3"
    )


@contextmanager
def started(unpacked: Unpacked, log: Path, *command: str) -> Iterator[str]:
    """Start a program of the image and yield the URL of its line `ready URL`."""
    with log.open("w") as sink:
        process = subprocess.Popen(
            unpacked.command(*command), stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        with log.open() as said:
            ready = said_by(process, said, r"^ready (http\S+)")
        yield ready[1]
    finally:
        process.terminate()  # each program replaced itself, so this is the router's own process
        assert process.wait(60) == 0, log.read_text()


def test_a_router_in_the_image_routes_a_request_and_is_healthy(
    unpacked: Unpacked, tmp_path: Path
) -> None:
    config = unpacked.config["config"]
    port, admin = str(lasting_port()), str(lasting_port())
    check = [word.replace(":8080", f":{port}") for word in config["Healthcheck"]["Test"][1:]]
    with pytest.raises(AssertionError):
        unpacked.run(*check)
    engine = ("warmroute-engine", "--timed", "llama-3.1-8b-h100", "--port", "0")
    with started(unpacked, tmp_path / "engine.log", *engine) as worker:
        router = [*config["Entrypoint"], *config["Cmd"], "--worker", worker]
        router += ["--config", "/dev/null", "--port", port, "--admin-port", admin]
        with started(unpacked, tmp_path / "router.log", *router):
            url = f"http://127.0.0.1:{port}"
            until_router_is_ready(url)
            body = b'{"model": "warmroute-timed", "prompt": "Once upon a time", "max_tokens": 4}'
            asked = urllib.request.Request(
                f"{url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=60) as reply:
                assert b'"choices"' in reply.read()
            unpacked.run(*check)


def test_the_same_files_give_a_byte_identical_layer(tmp_path: Path) -> None:
    folder = tmp_path / "opt" / "warmroute"
    folder.mkdir(parents=True)
    (folder / "b").write_text("2")
    (folder / "a").write_text("1")
    (folder / "c").symlink_to("a")
    first = image.layer(tmp_path, ["opt"], 1_700_000_000)
    os.utime(folder / "b", (5, 5))
    (folder / "a").chmod(0o666)
    assert image.layer(tmp_path, ["opt"], 1_700_000_000) == first


def test_a_wheel_for_another_python_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("apt-get") is None:
        pytest.skip("apt-get: an image is made of Debian's packages")
    monkeypatch.setattr(image, "BUILD", wheels.BUILD.parent / "image-of-another")
    with pytest.raises(image.ImageError, match="the wheel is of cp399"):
        image.make(tmp_path / "warmroute-1-cp399-cp399-linux_x86_64.whl", tmp_path / "out.tar")
