"""Tests of which Pythons wheels are built with, and what is reported of the others, with real
programs in PATH.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from release import image, wheels


def python(folder: Path, name: str, answer: str, code: int = 0) -> Path:
    """Write a program that answers the questions of `wheels.asked` as a Python
    interpreter would.
    """
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder the only one that is searched for Pythons; return it."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(wheels, "found", lambda minors: only_in(tmp_path, minors))
    return tmp_path


def only_in(folder: Path, minors: object) -> object:
    """Return the Pythons that the search finds in this folder, without the system's own."""
    return (one for one in FOUND(minors) if one.path.is_relative_to(folder))


FOUND = wheels.found


def test_each_reason_not_to_build_with_a_python_is_reported(tmp_path: Path) -> None:
    wrong = {
        "12 0 - /x": "has no Python.h",
        "10 1 - /x": "is Python 3.10; warmroute needs 3.11 or later",
        "13 1 t /x": "is free-threaded",
        "no": "no Python 3 runs there",
    }
    for answer, reason in wrong.items():
        with pytest.raises(wheels.WheelError, match=reason.replace(".", r"\.")):
            wheels.asked(python(tmp_path, "python", answer))
    with pytest.raises(wheels.WheelError, match="no Python 3 runs there"):
        wheels.asked(python(tmp_path, "python", "12 1 - /x", code=1))
    with pytest.raises(wheels.WheelError, match="no Python 3 runs there"):
        wheels.asked(tmp_path / "none")
    asked = wheels.asked(python(tmp_path, "python", "13 1 - /opt/python3.13"))
    assert (asked.path, asked.tag) == (Path("/opt/python3.13"), "cp312-abi3")


def test_wheels_are_built_by_the_running_python_and_one_found_in_path(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for minor, other, tags in (
        (11, 13, ["cp311-cp311", "cp312-abi3"]),
        (14, 11, ["cp312-abi3", "cp311-cp311"]),
    ):
        running = elsewhere / "running"
        python(elsewhere, "running", f"{minor} 1 - {running}")
        program = elsewhere / f"python3.{other}"
        python(elsewhere, program.name, f"{other} 1 - {program}")
        monkeypatch.setattr(sys, "executable", str(running))
        chosen, left_out = wheels.pythons([])
        assert [one.tag for one in chosen] == tags
        assert left_out == []
        program.unlink()
        chosen, left_out = wheels.pythons([])
        assert [one.tag for one in chosen] == tags[:1]
        (said,) = left_out
        assert f"left out: wheels for Python 3.{min(other, 12)}" in said
        assert "--python" in said


def test_if_no_python_can_build_the_error_gives_the_reason(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(python(elsewhere, "running", "11 0 - /x")))
    with pytest.raises(wheels.WheelError, match=r"no Python here can build .*no Python\.h"):
        wheels.pythons([])


def test_only_configured_pythons_are_used(elsewhere: Path) -> None:
    named = str(python(elsewhere, "mine", "12 1 - /opt/mine"))
    assert [one.tag for one in wheels.pythons([named])[0]] == ["cp312-abi3"]


def test_a_wheel_is_checked_for_processor_glibc_and_size(tmp_path: Path) -> None:
    name = "warmroute-1-cp311-cp311-manylinux2014_aarch64.manylinux_2_17_aarch64.whl"
    wheel = tmp_path / name
    wheel.write_bytes(b"")
    wheels.check(wheel, "aarch64")
    with pytest.raises(wheels.WheelError, match="not for x86_64"):
        wheels.check(wheel, "x86_64")
    wheel.write_bytes(bytes(wheels.MAX_BYTES + 1))
    with pytest.raises(wheels.WheelError, match="more than 4000000"):
        wheels.check(wheel, "aarch64")
    late = tmp_path / "warmroute-1-cp311-cp311-manylinux_2_29_x86_64.whl"
    late.write_bytes(b"")
    with pytest.raises(wheels.WheelError, match=r"not for x86_64 with glibc 2\.28"):
        wheels.check(late, "x86_64")


def test_an_image_takes_the_wheel_that_its_python_can_import() -> None:
    own, stable = Path("warmroute-1-cp311-cp311-x.whl"), Path("warmroute-1-cp312-abi3-x.whl")
    fit = {
        version: [image.fits(wheel, version) for wheel in (own, stable)]
        for version in ("python3.11", "python3.12", "python3.13")
    }
    assert fit == {
        "python3.11": [True, False],
        "python3.12": [False, True],
        "python3.13": [False, True],
    }
