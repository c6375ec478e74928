"""Tests of files and DNS as sources of workers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from router.discovery.plain_sources import DnsSource, FileSource
from router.discovery.source import DnsSpec, parse_source
from router.fleet.sources import Report, Source

LOOK_S = 0.01


async def reports_of(source: Source) -> AsyncIterator[Report]:
    """Yield the reports of a source; each must come within ten seconds."""
    async with aclosing(source.reports()) as reports:  # type: ignore[type-var]
        while True:
            yield await asyncio.wait_for(anext(reports), 10.0)


def urls(report: Report) -> list[str]:
    assert report.workers is not None
    return [one.spec.name for one in report.workers]


def replace_with(path: Path, text: str) -> None:
    """Replace a file by renaming, as careful programs do."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("w.json", json.dumps(["http://a", {"url": "http://b", "weight": 2}])),
        ("w.json", json.dumps({"workers": ["http://a", "http://b,weight=2"]})),
        ("w.yaml", "- http://a\n- url: http://b\n  weight: 2\n"),
        ("w.yml", "workers: [http://a, 'http://b,weight=2']\n"),
        ("w.txt", "# ours\nhttp://a  # the first\n\nhttp://b,weight=2\n"),
    ],
)
async def test_workers_are_read_from_each_file_format(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    report = await anext(reports_of(FileSource(tmp_path / name)))
    assert report.workers is not None
    assert [str(one.spec) for one in report.workers] == ["http://a", "http://b,weight=2"]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("w.json", '["http://a", ', "not json"),
        ("w.json", "{}", "must be a list of workers, or a mapping"),
        ("w.json", "[3]", "worker 1: a worker is text or a mapping"),
        ("w.yaml", "- [", "not yaml"),
        ("w.yaml", "a: &a [*a]", "must be a list"),
        ("w.txt", "http://a\nftp://b\n", "line 2: 'ftp://b' is not of the form http(s)"),
        ("w.txt", "http://a\nhttp://a/\n", "line 2: http://a is given twice"),
        ("w.txt", "http://user:secret@a\n", "line 1: the url carries a user or password"),
        ("w.txt", " \n", "it is empty; write []"),
        ("w.json", "[" * 100_000, "not json"),
        ("w.txt", "#" * (1 << 20) + "\n", "larger than"),
        ("w.txt", "\n".join(f"http://w:{port}" for port in range(1, 4_200)), "allowed: 4096"),
    ],
)
async def test_the_report_of_an_invalid_file_has_the_reason(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    report = await anext(reports_of(FileSource(tmp_path / name)))
    assert report.workers is None
    assert says in report.trouble
    assert "secret" not in report.trouble


async def test_a_file_that_is_not_utf_8_is_reported_as_such(tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_bytes(b"http://a\n\xff\n")
    report = await anext(reports_of(FileSource(tmp_path / "w.txt")))
    assert report.workers is None
    assert report.trouble.startswith("not text: 'utf-8' codec")


async def test_a_file_is_followed_when_it_is_replaced_deleted_or_broken(tmp_path: Path) -> None:
    path = tmp_path / "w.txt"
    reports = reports_of(FileSource(path, LOOK_S))
    assert "cannot be read: No such file" in (await anext(reports)).trouble
    replace_with(path, "http://a\n")
    assert urls(await anext(reports)) == ["http://a"]
    replace_with(path, "http://b\n")
    assert urls(await anext(reports)) == ["http://b"]
    path.unlink()
    gone = await anext(reports)
    assert urls(gone) == ["http://b"]  # the last good set stays
    assert "No such file or directory; what it said before stays" in gone.trouble
    replace_with(path, "htp:/half")
    assert urls(broken := await anext(reports)) == ["http://b"]
    assert "line 1" in broken.trouble
    replace_with(path, "# nobody\n")
    assert (await anext(reports)) == Report(())


async def test_a_file_is_read_only_when_it_is_no_longer_being_written(tmp_path: Path) -> None:
    path = tmp_path / "w.txt"
    path.write_text("http://a\n")
    source = FileSource(path, look_s=0.05)
    reports = reports_of(source)
    assert urls(await anext(reports)) == ["http://a"]
    next_one = asyncio.ensure_future(anext(reports))
    with path.open("w") as file:
        for number in range(20):  # each line makes a file that looks whole
            file.write(f"http://w{number}\n")
            file.flush()
            await asyncio.sleep(0.01)
            assert not next_one.done()
    assert urls(await next_one) == [f"http://w{number}" for number in range(20)]


def dns(text: str, **options: Any) -> DnsSource:
    spec = parse_source(text)
    assert isinstance(spec, DnsSpec)
    return DnsSource(spec, **options)


def set_dns_answers(monkeypatch: pytest.MonkeyPatch, *given: Any) -> list[tuple[str, int]]:
    """Make the system's resolver give these answers one after another, and the last one from then
    on.
    """
    asked: list[tuple[str, int]] = []
    left = list(given)

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        asked.append((host, port))
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in answer]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked


async def test_each_address_of_a_dns_name_is_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    no_name = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    hosts = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]
    asked = set_dns_answers(monkeypatch, hosts, no_name, ["10.0.0.3"])
    reports = reports_of(dns("dns:pool:81,every=0.1,weight=2"))
    first = await anext(reports)
    assert urls(first) == ["http://10.0.0.1:81", "http://10.0.0.2:81", "http://[fd00::1]:81"]
    assert first.workers is not None
    assert {one.spec.weight for one in first.workers} == {2.0}
    failed = await anext(reports)
    assert failed.workers is None
    assert failed.trouble == "pool does not resolve: [Errno -2] Name or service not known"
    assert urls(await anext(reports)) == ["http://10.0.0.3:81"]
    assert set(asked) == {("pool", 81)}


async def test_an_invalid_address_is_refused_and_shown_in_the_report(monkeypatch) -> None:
    set_dns_answers(monkeypatch, ["10.0.0.1", "fe80::1%bad zone"])
    report = await anext(reports_of(dns("dns:pool:81")))
    assert urls(report) == ["http://10.0.0.1:81"]
    assert len(report.refused) == 1
    assert report.refused[0].startswith("fe80::1%bad zone: ")


async def test_names_are_resolved_by_the_system_resolver() -> None:
    report = await anext(reports_of(dns("dns:localhost:81")))
    assert "http://127.0.0.1:81" in urls(report)
    report = await anext(reports_of(dns("dns:nobody.invalid:81")))
    assert report.workers is None
    assert "nobody.invalid does not resolve" in report.trouble


async def test_a_hanging_resolver_gets_only_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    async def hangs(*_: Any, **__: Any) -> list[Any]:
        nonlocal asked
        asked += 1
        return await answer

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", hangs, raising=False)
    reports = reports_of(dns("dns:pool:81,every=0.1", answer_s=0.02))
    for _ in range(3):
        assert (await anext(reports)).trouble == "pool: no answer from DNS in 0.02 s"
    answer.set_result([(2, 1, 6, "", ("10.0.0.1", 81))])
    report = await anext(reports)
    while report.workers is None:
        report = await anext(reports)
    assert urls(report) == ["http://10.0.0.1:81"]
    assert asked == 1
