"""Makes the TLS contexts of the ports and of connections to workers, from files that may change
while the router runs.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The certificate files of one port; they are read again on reload. Lifetime: until the next
    reload.
    """

    cert: Annotated[
        str | None,
        Meta(
            description="PEM file of the port's certificate and chain; none: no TLS",
            extra={"metavar": "FILE"},
        ),
    ] = None
    key: Annotated[
        str | None,
        Meta(description="PEM file of the private key of `cert`", extra={"metavar": "FILE"}),
    ] = None
    client_ca: Annotated[
        str | None,
        Meta(
            description=(
                "PEM file of authorities that sign clients' certificates; none: clients need no "
                "certificate"
            ),
            extra={"metavar": "FILE"},
        ),
    ] = None


class WorkerTls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The certificate files for https connections to workers. Lifetime: until the next reload."""

    ca: Annotated[
        str | None,
        Meta(
            description=(
                "PEM file of authorities that sign workers' certificates; none: the "
                "system's authorities"
            ),
            extra={"metavar": "FILE"},
        ),
    ] = None
    cert: Annotated[
        str | None,
        Meta(
            description=(
                "PEM file of the certificate that the router shows to workers; none: no certificate"
            ),
            extra={"metavar": "FILE"},
        ),
    ] = None
    key: Annotated[
        str | None,
        Meta(description="PEM file of the private key of `cert`", extra={"metavar": "FILE"}),
    ] = None


class TlsError(ValueError):
    """Raised for a TLS file that cannot be used; the text names the file and the reason."""


def server_tls(files: Tls) -> ssl.SSLContext | None:
    """Return the TLS context of a port, for TLS 1.2 and later; None if no certificate is
    configured. Raises TlsError.
    """
    if files.cert is None:
        if files.key is not None or files.client_ca is not None:
            raise TlsError("TLS files are given, but no certificate (`cert`)")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_own(context, files.cert, files.key)
    if files.client_ca is not None:
        load_authorities(context, files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def worker_tls(files: WorkerTls, insecure: bool = False) -> ssl.SSLContext:
    """Return the TLS context for connections to workers. With `insecure`, any certificate is
    accepted. Raises TlsError.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without the system's authorities
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_authorities(context, files.ca)
    if files.cert is not None:
        load_own(context, files.cert, files.key)
    elif files.key is not None:
        raise TlsError("workers_tls.key is given, but no workers_tls.cert")
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def renew(context: ssl.SSLContext, files: Tls) -> None:
    """Read a port's certificate files again, for new connections. If that fails, raise TlsError and
    change nothing.

    New authorities are added; an authority is removed only by a restart.
    """
    server_tls(files)
    assert files.cert is not None
    load_own(context, files.cert, files.key)
    if files.client_ca is not None:
        load_authorities(context, files.client_ca)


def load_own(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    """Load the router's own certificate and its private key into a TLS context. Raises TlsError."""
    try:
        # A key with a password would ask for it on the terminal.
        context.load_cert_chain(cert, key, password=lambda: "")
    except ssl.SSLError as error:
        what = (
            "the key does not belong to the certificate"
            if "MISMATCH" in str(error)
            else ("no PEM file of a certificate and its key (without a password)")
        )
        raise TlsError(f"{cert}, {key}: {what}") from error
    except OSError as error:
        raise TlsError(f"{cert}, {key}: {error.strerror}") from error


def load_authorities(context: ssl.SSLContext, path: str) -> None:
    """Load the certificates of trusted authorities into a TLS context. Raises TlsError."""
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise TlsError(f"{path}: no PEM file of certificates") from error
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}") from error


def pem(path: str) -> bytes:
    """Return the contents of a PEM file, in the form in which gRPC takes them. Raises TlsError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}") from error
