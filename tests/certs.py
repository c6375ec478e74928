"""Makes real certificates for tests with the openssl command."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from router.http.tls import Tls, WorkerTls

EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    cert: str
    key: str


class Authority:
    """A certificate authority that signs certificates for tests. Lifetime: test."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.pair = Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
        _openssl(
            *("req", "-x509", *EC, "-days", "2", "-subj", f"/CN={name}"),
            *("-keyout", self.pair.key, "-out", self.pair.cert),
        )

    def signed(self, name: str, names: str = "DNS:localhost,IP:127.0.0.1") -> Pair:
        """Return a certificate for `names`, signed by this authority."""
        pair = Pair(str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key"))
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\n")
        _openssl("req", *EC, "-subj", f"/CN={name}", "-keyout", pair.key, "-out", str(request))
        _openssl(
            *("x509", "-req", "-in", str(request), "-days", "2", "-extfile", str(extensions)),
            *("-CA", self.pair.cert, "-CAkey", self.pair.key, "-CAcreateserial"),
            *("-out", pair.cert),
        )
        return pair

    def client(self, pair: Pair | None = None) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts this authority, and presents `pair` if it
        is given.
        """
        context = ssl.create_default_context(cafile=self.pair.cert)
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        return context

    def port(self, pair: Pair, *, asks: bool = False) -> Tls:
        """Return the TLS files of a port that presents `pair`; with `asks` it demands clients'
        certificates from this authority.
        """
        return Tls(cert=pair.cert, key=pair.key, client_ca=self.pair.cert if asks else None)

    def workers(self) -> WorkerTls:
        """Return the TLS files of a router whose workers have certificates from this authority."""
        return WorkerTls(ca=self.pair.cert)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
