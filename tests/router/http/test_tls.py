"""Tests of TLS files: valid ones are used, and invalid ones give clear errors."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from router.engines.spec import WorkerSpecError
from router.engines.worker_spec import parse_worker_spec
from router.http.tls import Tls, TlsError, WorkerTls, renew, server_tls, worker_tls
from tests.certs import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def test_without_a_certificate_the_server_has_no_tls() -> None:
    assert server_tls(Tls()) is None


def test_every_tls_context_requires_tls_1_2_or_newer(authority) -> None:
    server = server_tls(authority.port(authority.signed("server")))
    contexts = [server, worker_tls(WorkerTls()), worker_tls(authority.workers())]
    contexts.append(worker_tls(WorkerTls(), insecure=True))
    for context in contexts:
        assert context is not None
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_certificates_are_verified_as_configured(authority) -> None:
    pair = authority.signed("server")
    modes = [server_tls(authority.port(pair, asks=asks)).verify_mode for asks in (False, True)]
    assert modes == [ssl.CERT_NONE, ssl.CERT_REQUIRED]
    for files in (WorkerTls(), authority.workers()):
        assert worker_tls(files).verify_mode is ssl.CERT_REQUIRED
        assert worker_tls(files).check_hostname
    assert worker_tls(WorkerTls(), insecure=True).verify_mode is ssl.CERT_NONE


def test_a_configured_ca_replaces_the_system_cas_for_workers(authority) -> None:
    assert len(worker_tls(authority.workers()).get_ca_certs()) == 1


def test_the_error_contains_the_unusable_tls_file(authority, tmp_path: Path) -> None:
    pair, other = authority.signed("one"), authority.signed("two")
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("no certificate")
    for files, words in (
        (Tls(cert=pair.cert, key=other.key), "does not belong"),
        (Tls(cert=str(rubbish), key=pair.key), "no PEM"),
        (Tls(cert=pair.cert, key=str(rubbish)), "no PEM"),
        (Tls(cert=pair.cert, key=str(tmp_path / "none")), "No such file"),
        (Tls(cert=pair.cert, key=pair.key, client_ca=str(rubbish)), "no PEM"),
        (Tls(key=pair.key), "no certificate"),
        (Tls(client_ca=authority.pair.cert), "no certificate"),
    ):
        with pytest.raises(TlsError, match=words):
            server_tls(files)
    for workers in (WorkerTls(ca=str(rubbish)), WorkerTls(key=pair.key)):
        with pytest.raises(TlsError):
            worker_tls(workers)


def test_bad_files_leave_the_old_ones_in_place(authority, tmp_path: Path) -> None:
    pair = authority.signed("kept")
    files = authority.port(pair)
    context = server_tls(files)
    assert context is not None
    key = Path(pair.key).read_text()
    Path(pair.key).write_text("gone")
    with pytest.raises(TlsError):
        renew(context, files)
    Path(pair.key).write_text(key)
    renew(context, files)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://h:1,insecure=true", "https"),
        ("http://h:1,server_name=x", "https"),
        ("https://h:1,insecure=perhaps", "true, false"),
        ("https://h:1,insecure=true,server_name=x", "leave out"),
    ],
)
def test_invalid_tls_options_of_a_worker_are_refused(text: str, words: str) -> None:
    with pytest.raises(WorkerSpecError, match=words):
        parse_worker_spec(text)


@pytest.mark.parametrize("option", ["insecure=true", "server_name=engine.internal"])
def test_tls_options_of_a_worker_survive_a_round_trip_through_text(option: str) -> None:
    spec = parse_worker_spec(f"https://h:1,{option}")
    assert parse_worker_spec(str(spec)) == spec
    assert str(spec) == f"https://h:1,{option}"
