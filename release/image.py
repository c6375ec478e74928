"""An OCI image of the router from Debian's packages and a wheel, without a daemon: `make image`.

    python -m release.image [WHEEL] [--out build/warmroute-image.tar]

Two layers: Debian's Python with the libraries that it needs, no shell and no package manager; and
the wheel with the extras that a router in a cluster uses. The packages are those of the Debian that
this runs on, whose Python must be the wheel's. The archive is an OCI layout, as `docker load`,
`podman load` and `skopeo copy oci-archive:` take it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "image"
EXTRAS = "grpc,kubernetes,otel"
USER = 65532  # whom images without a shell call nonroot
MAX_BYTES = 250_000_000  # of all files in the image
# Packages that only the others' scripts need, or modules of Python that nobody here imports (nis,
# readline).
LEFT_OUT = re.compile(
    r"c?debconf|dpkg|.*awk$|install-info|mailcap|mime-support|openssl|perl|readline|tar$|"
    r"lib(acl|com-err2|db5|debian|gdbm|gmp|gssapi|k5|keyutils|krb|md0|mpfr|ncurses|newt|nsl|"
    r"pcre|perl|readline|selinux|sigsegv|slang|textwrap|tinfo|tirpc|zstd)"
)
WANTED = ("python3", "libstdc++6", "ca-certificates", "tzdata", "netbase", "base-files")
# Nobody reads them in an image without a shell.
UNREAD = ("usr/share/doc", "usr/share/man", "usr/share/lintian", "usr/share/bug", "usr/share/info")
HOME = "opt/warmroute"
# Fails unless the router answers 200.
HEALTH = "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health', timeout=3)"
PROGRAM = """#!/{home}/bin/python3 -P
import sys
from {module} import {function}
sys.exit({function}())
"""
LAYOUT = b'{"imageLayoutVersion": "1.0.0"}'


class ImageError(Exception):
    """An image that cannot be made here: says why."""


def run(*command: str, cwd: Path = ROOT) -> str:
    """Standard output of a command. Raises ImageError with what it said, where it fails."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ImageError(
            f"{command[0]} is not here: this needs Debian or one of its kind"
        ) from error
    if done.returncode:
        raise ImageError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def debian_packages() -> list[str]:
    """Names of the packages of the base, for this machine's Debian."""
    only = [
        f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces")
    ]
    text = run("apt-cache", "depends", "--recurse", *only, "--no-enhances", *WANTED)
    names = set(re.findall(r"^([a-z0-9][a-z0-9.+-]*)$", text, re.MULTILINE))
    return sorted(name for name in names if not LEFT_OUT.match(name))


def unpack_debian(packages: Sequence[str], root: Path) -> None:
    """Put the base below a folder, as Debian's installer would leave it."""
    packed = BUILD / "debian"
    packed.mkdir(parents=True, exist_ok=True)
    run("apt-get", "download", "--quiet", "-o", "APT::Sandbox::User=root", *packages, cwd=packed)
    for package in sorted(packed.glob("*.deb")):
        run("dpkg-deb", "--extract", str(package), str(root))
        control = run("dpkg-deb", "--field", str(package))
        # Scanners of images read which packages are in one without Debian's own tools.
        told = root / "var/lib/dpkg/status.d" / package.name.partition("_")[0]
        told.parent.mkdir(parents=True, exist_ok=True)
        told.write_text(control, encoding="utf-8")
    for name in UNREAD:
        shutil.rmtree(root / name, ignore_errors=True)
    certificates = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_text("".join(path.read_text(encoding="utf-8") for path in certificates))
    (root / "etc/passwd").write_text(
        f"root:x:0:0:root:/root:/usr/sbin/nologin\nwarmroute:x:{USER}:{USER}::/:/usr/sbin/nologin\n"
    )
    (root / "etc/group").write_text(f"root:x:0:\nwarmroute:x:{USER}:\n")


def install_wheel(wheel: Path, root: Path, python: str) -> None:
    """Put the wheel, its extras and their programs below a folder, for `python` of the base."""
    packages = root / HOME / "lib" / python / "site-packages"
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-build"]
    at = ["--target", str(packages), "--python-version", python.removeprefix("python")]
    run(*uv, *at, "-c", str(ROOT / "constraints.txt"), f"{wheel}[{EXTRAS}]")
    shutil.rmtree(packages / "bin", ignore_errors=True)  # for the Python that ran uv
    for unread in ("tests", "__pycache__"):
        for folder in list(packages.rglob(unread)):
            shutil.rmtree(folder, ignore_errors=True)
    # tokenizers asks for it, to load models from a hub faster. Nothing here loads from a hub.
    for path in packages.glob("hf_xet*"):
        shutil.rmtree(path)
    for name in ("direct_url.json", "uv_cache.json"):  # where and when this machine installed it
        for told in packages.glob(f"*.dist-info/{name}"):
            told.unlink()
    programs = root / HOME / "bin"
    programs.mkdir(parents=True)
    (programs / "python3").symlink_to(f"/usr/bin/{python}")
    (root / HOME / "pyvenv.cfg").write_text(
        "home = /usr/bin\ninclude-system-site-packages = false\n"
    )
    for name, module, function in entry_points(wheel):
        text = PROGRAM.format(home=HOME, module=module, function=function)
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)


def entry_points(wheel: Path) -> Iterator[tuple[str, str, str]]:
    """(name, module, function) of each program that a wheel installs."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith("/entry_points.txt"))
        text = packed.read(name).decode()
    yield from re.findall(r"^([\w-]+) = ([\w.]+):(\w+)$", text, re.MULTILINE)


def missing_libraries(root: Path) -> list[str]:
    """`FILE needs LIBRARY` for each shared library that no file below a folder is."""
    from elftools.elf.elffile import ELFFile  # `make image` alone needs it

    there = {path.name for path in root.rglob("*.so*")}
    lacking = []
    for path in sorted(root.rglob("*.so*")):
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                continue
            dynamic: Any = ELFFile(file).get_section_by_name(".dynamic")
            needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")] if dynamic else []
        lacking += [
            f"{path.relative_to(root)} needs {name}" for name in needed if name not in there
        ]
    return lacking


def drop_modules_without_libraries(root: Path) -> None:
    """Delete modules of Python's own library that need what was left out. Raises ImageError where
    anything else does.
    """
    for line in missing_libraries(root):
        name, _, library = line.partition(" needs ")
        if "lib-dynload" not in name:
            raise ImageError(f"{name} needs {library}, which is not in the image")
        (root / name).unlink(missing_ok=True)


def layer(root: Path, folders: Sequence[str], made_s: int) -> bytes:
    """A tar of folders below a root: sorted, root's, one date; the same bytes each time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for folder in folders:
            for path in [root / folder, *sorted((root / folder).rglob("*"))]:
                info = tar.gettarinfo(str(path), str(path.relative_to(root)))
                info.uid = info.gid = 0
                info.uname = info.gname = "root"
                info.mtime = made_s
                info.mode &= ~0o6022  # nothing runs as another user, nobody else writes
                with path.open("rb") if info.isfile() else io.BytesIO() as content:
                    tar.addfile(info, content if info.isfile() else None)
    return buffer.getvalue()


def configuration(layers: Sequence[bytes], version: str, made_s: int) -> dict[str, Any]:
    """The image's configuration (OCI image specification 1.1; Docker reads Healthcheck as well)."""
    made = datetime.fromtimestamp(made_s, UTC).isoformat()
    label = "org.opencontainers.image"
    return {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
        "os": "linux",
        "created": made,
        "config": {
            "User": f"{USER}:{USER}",
            "WorkingDir": "/",
            "Entrypoint": [f"/{HOME}/bin/warmroute"],
            "Cmd": ["serve"],
            "Env": [
                f"PATH=/{HOME}/bin:/usr/bin:/bin",
                "LANG=C.UTF-8",
                "PYTHONDONTWRITEBYTECODE=1",
                "WARMROUTE_HOST=0.0.0.0",
                "WARMROUTE_CONFIG=/etc/warmroute/router.yaml",
            ],
            "ExposedPorts": {"8080/tcp": {}},
            "StopSignal": "SIGTERM",
            "Healthcheck": {
                "Test": ["CMD", "/usr/bin/python3", "-Ic", HEALTH],
                "Interval": 10_000_000_000,  # in ns
                "Timeout": 5_000_000_000,
                "StartPeriod": 20_000_000_000,
                "Retries": 3,
            },
            "Labels": {
                f"{label}.title": "warmroute",
                f"{label}.description": "KV-cache-aware router in front of LLM engines",
                f"{label}.version": version,
                f"{label}.created": made,
                f"{label}.licenses": "Apache-2.0",
            },
        },
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in layers],
        },
    }


def path_of(blob: dict[str, Any]) -> str:
    """Where a layout keeps a blob that this descriptor names."""
    return f"blobs/{blob['digest'].replace(':', '/')}"


def write_archive(out: Path, layers: Sequence[bytes], config: dict[str, Any], tag: str) -> None:
    """An OCI layout with one image, as a tar."""
    blobs: dict[str, bytes] = {}

    def blob(content: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    base = "application/vnd.oci.image"
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": f"{base}.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), f"{base}.config.v1+json"),
        "layers": [
            blob(gzip.compress(one, 6, mtime=0), f"{base}.layer.v1.tar+gzip") for one in layers
        ],
    }
    named = blob(json.dumps(manifest).encode(), f"{base}.manifest.v1+json")
    named["annotations"] = {
        "org.opencontainers.image.ref.name": tag,
        "io.containerd.image.name": f"docker.io/library/warmroute:{tag}",
    }
    index = {"schemaVersion": 2, "mediaType": f"{base}.index.v1+json", "manifests": [named]}
    # Docker before 25 reads this file and knows no layout.
    old = {
        "Config": path_of(manifest["config"]),
        "RepoTags": [f"warmroute:{tag}"],
        "Layers": [path_of(one) for one in manifest["layers"]],
    }
    files = {"oci-layout": LAYOUT, "index.json": json.dumps(index).encode()}
    files["manifest.json"] = json.dumps([old]).encode()
    files |= {f"blobs/sha256/{digest}": content for digest, content in blobs.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def made_at() -> int:
    """Seconds since 1970: SOURCE_DATE_EPOCH, else the last commit's time."""
    told = os.environ.get("SOURCE_DATE_EPOCH")
    return int(told or run("git", "log", "-1", "--format=%ct"))


def make(wheel: Path | None, out: Path) -> int:
    """Make the image; bytes of its files. Without `wheel`: of the newest one in dist/ that fits.

    Raises ImageError where it cannot be made.
    """
    packages = debian_packages()
    (python,) = (name for name in packages if re.fullmatch(r"python3\.\d+", name))
    wheel = wheel or newest_wheel(python)
    _, version, tag, *_ = wheel.name.split("-")
    if not fits(wheel, python):
        raise ImageError(f"this Debian has {python}, the wheel is of {tag}")
    root, made_s = BUILD / "root", made_at()
    shutil.rmtree(BUILD, ignore_errors=True)
    unpack_debian(packages, root)
    base = sorted(path.name for path in root.iterdir() if path.name != "opt")
    install_wheel(wheel, root, python)
    drop_modules_without_libraries(root)
    size = sum(p.stat().st_size for p in root.rglob("*") if p.is_file() and not p.is_symlink())
    if size > MAX_BYTES:
        raise ImageError(f"the image has {size / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f}")
    layers = [layer(root, base, made_s), layer(root, [HOME], made_s)]
    write_archive(out, layers, configuration(layers, version, made_s), version)
    return size


def fits(wheel: Path, python: str) -> bool:
    """Whether a Python, as `python3.11`, can import the modules of the wheel: the wheel is of that
    Python's ABI, or of the stable ABI of that Python or an earlier one.
    """
    tag, abi = wheel.name.split("-")[2:4]
    wanted, here = int(tag.removeprefix("cp3")), int(python.rpartition(".")[2])
    return here == wanted or (abi == "abi3" and here > wanted)


def newest_wheel(python: str) -> Path:
    """The wheel in dist/ of this machine's kind for this Python. Raises ImageError without any."""
    found = (ROOT / "dist").glob(f"warmroute-*_{os.uname().machine}.whl")
    wheels = sorted(
        (path for path in found if fits(path, python)), key=lambda path: path.stat().st_mtime
    )
    if not wheels:
        raise ImageError(f"no wheel of {python} in {ROOT / 'dist'}: `make wheel` makes one")
    return wheels[-1]


def main() -> None:
    """The command. Ends with 1 and a reason where the image cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m release.image", description=__doc__)
    parser.add_argument("wheel", type=Path, nargs="?", help="default: the newest in dist/")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "warmroute-image.tar")
    options = parser.parse_args()
    try:
        size = make(options.wheel and options.wheel.resolve(strict=True), options.out)
    except (ImageError, FileNotFoundError) as error:
        sys.exit(f"image: {error}")
    packed = options.out.stat().st_size
    print(f"{options.out}: {packed / 1e6:.0f} MB, {size / 1e6:.0f} MB unpacked")


if __name__ == "__main__":
    main()
