"""Tests of the release workflow: its commands exist, and it names no host and no account."""

from __future__ import annotations

import re
from typing import Any

import yaml

from release.wheels import ROOT

TEXT = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
JOBS: dict[str, Any] = yaml.safe_load(TEXT)["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]
LINES = [line for step in STEPS for line in step.get("run", "").replace("\\\n", " ").splitlines()]
RUNS = "\n".join(LINES)
PROGRAMS = {
    *("apt-get", "grep", "make", "pip", "pipx", "python", "warmroute", "skopeo", "helm"),
}
ACTIONS = ("checkout", "setup-python", "upload-artifact", "download-artifact")


def test_the_workflow_uses_existing_make_targets_and_variables() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    made = re.findall(r"^make ([\w-]+)", RUNS, re.MULTILINE)
    assert made == ["wheel", "image", "chart"]
    assert set(made) <= set(re.findall(r"^([\w-]+):", text, re.MULTILINE))
    variables = set(re.findall(r" ([A-Z_]+)=\S", RUNS))
    assert variables <= set(re.findall(r"^([A-Z_]+) \?=", text, re.MULTILINE))


def test_the_workflow_uses_only_available_programs_and_actions() -> None:
    assert {line.split()[0] for line in LINES if not line.startswith("tag=")} <= PROGRAMS
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert used
    assert all(re.fullmatch(rf"actions/({'|'.join(ACTIONS)})@v\d+", one) for one in used)


def test_each_job_needs_an_existing_job() -> None:
    assert {job.get("needs") for job in JOBS.values()} == {None, "build", "try"}
    for name, job in JOBS.items():
        assert not name.startswith("publish") or job["needs"] == "try"


def test_published_files_are_those_that_were_built() -> None:
    (kept,) = (step["with"]["path"].split() for step in STEPS if "upload-artifact" in str(step))
    for name in re.findall(r"(?:dist|build)/\S*\.(?:whl|tgz|tar(?:\.gz)?)", RUNS):
        assert any(name.startswith(one.split("*")[0]) for one in kept), name


def test_publishing_targets_come_only_from_variables() -> None:
    assert set(re.findall(r"\w+://[^/\s\"]*", TEXT)) <= {"docker://$REGISTRY", "oci://$REGISTRY"}
    assert re.findall(r"[\w-]+\.(?:com|org|io|dev|net)\b", TEXT) == []
    for name, job in JOBS.items():
        if name.startswith("publish"):
            assert re.fullmatch(r"vars\.\w+ != ''", job["if"])
            told = {**job.get("env", {}), **job["steps"][-1].get("env", {})}
            assert len(told) == 3
            for value in told.values():
                assert re.fullmatch(r"\$\{\{ (vars|secrets)\.\w+ \}\}", value)
