"""Tests of the forms of a worker's URL that people paste."""

from __future__ import annotations

import pytest

from router.cli.main import main
from router.engines.spec import WorkerSpecError
from router.engines.worker_spec import parse_worker_spec, worker_spec_of
from tests.router.settings.config_problems import loaded


@pytest.mark.parametrize(
    ("written", "url"),
    [
        *((text, "http://gpu1:8000") for text in ("http://gpu1:8000", "http://gpu1:8000/")),
        *((text, "http://gpu1:8000") for text in ("http://gpu1:8000/v1", "gpu1:8000/v1/")),
        *((text, "http://gpu1:8000") for text in ("gpu1:8000", "gpu1:8000/v1/chat/completions")),
        *(("localhost:8000", "http://localhost:8000"), ("10.0.0.1:80/", "http://10.0.0.1:80")),
        *(("[::1]:8000", "http://[::1]:8000"), ("https://gw/team/v1", "https://gw/team")),
        *(("http://gw/v1beta", "http://gw/v1beta"), ("http://gw/av1", "http://gw/av1")),
    ],
)
def test_each_form_of_a_url_is_read(written, url):
    assert parse_worker_spec(f"{written},weight=2").url == url
    assert worker_spec_of({"url": written}).url == url
    spec = parse_worker_spec(written)
    assert parse_worker_spec(str(spec)) == spec


@pytest.mark.parametrize("text", ["gpu1", "8000", "ftp://gpu1:8000", "http://:8000", "gpu1:x", ""])
def test_an_invalid_url_is_refused_with_a_valid_example(text):
    with pytest.raises(WorkerSpecError, match="as in http://gpu1:8000"):
        parse_worker_spec(text)


def test_a_corrected_url_is_noted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.environ", {})
    path = tmp_path / "router.yaml"
    path.write_text("workers:\n  - gpu1:8000,weight=2\n  - http://b:1/\n  - url: http://c:2/v1\n")
    notes = [
        f"{path}:2: the worker gpu1:8000 is read as http://gpu1:8000",
        f"{path}:4: the worker http://c:2/v1 is read as http://c:2",
    ]
    assert list(loaded(file=path.read_text(), tmp_path=tmp_path).notes) == notes
    assert main(["config", "--check", str(path)]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"note: {note}" for note in notes]
    assert said.out.startswith("ok: 1 of")
    assert loaded("--worker", "http://gpu1:8000").notes == ()
