"""A service's EndpointSlices (Kubernetes, `discovery.k8s.io/v1`) and the workers in them. No I/O.

An endpoint is a worker while it is `ready`, and stops when it is `terminating`; a missing condition
counts as the API says: ready and serving where unknown, not terminating. Of an address in several
slices, as while one is replaced by another, the best standing counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from router.discovery.source import Report, Seen, bounded
from router.discovery.spec import KubernetesSpec
from router.worker_spec import WorkerSpecError

MAX_SLICES = 256
OLD = 410  # "Gone": the version asked for is too old, all is to be listed anew


class Conditions(msgspec.Struct):
    """None: unknown."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Endpoint(msgspec.Struct):
    """One or several addresses that mean the same."""

    addresses: tuple[str, ...] = ()
    conditions: Conditions = msgspec.field(default_factory=Conditions)


class Port(msgspec.Struct):
    """A port of all endpoints of a slice."""

    port: int | None = None
    name: str | None = None
    protocol: str | None = None


class Meta(msgspec.Struct, rename="camel"):
    """Which slice, and when."""

    name: str = ""
    resource_version: str = ""


class Slice(msgspec.Struct, rename="camel"):
    """An EndpointSlice; other fields are passed over."""

    metadata: Meta = msgspec.field(default_factory=Meta)
    address_type: str = "IPv4"
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[Port, ...] | None = None


class Listed(msgspec.Struct):
    """The answer to a list."""

    metadata: Meta
    items: tuple[Slice, ...] | None = None


class Event(msgspec.Struct):
    """A line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class Status(msgspec.Struct):
    """What an ERROR carries."""

    code: int = 0
    reason: str = ""
    message: str = ""


class TooOldError(Exception):
    """The version that was asked for is gone: list anew."""


class SliceError(ValueError):
    """What came is no answer of a Kubernetes API."""


def decode_list(data: bytes) -> Listed:
    """Raises SliceError."""
    try:
        listed = msgspec.json.decode(data, type=Listed)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise SliceError(f"no list of EndpointSlices: {error}") from error
    if len(listed.items or ()) > MAX_SLICES:
        raise SliceError(f"{len(listed.items or ())} slices; at most {MAX_SLICES} fit")
    return listed


class Slices:
    """All slices of a service as of the latest event. Lifetime: from one list to the next."""

    def __init__(self, listed: Listed) -> None:
        self.version = listed.metadata.resource_version
        self._by_name: dict[str, Slice] = {one.metadata.name: one for one in listed.items or ()}

    def take(self, line: bytes) -> bool:
        """An event; whether a slice changed. Raises SliceError, TooOldError."""
        try:
            event = msgspec.json.decode(line, type=Event)
            if event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=Status)
                if status.code == OLD:
                    raise TooOldError(status.message)
                raise SliceError(f"the watch ended: {status.code} {status.reason[:80]}")
            one = msgspec.json.decode(event.object, type=Slice)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise SliceError(f"no event of EndpointSlices: {error}") from error
        self.version = one.metadata.resource_version or self.version
        if event.type == "BOOKMARK":
            return False
        if event.type == "DELETED":
            self._by_name.pop(one.metadata.name, None)
        else:
            self._by_name[one.metadata.name] = one
        if len(self._by_name) > MAX_SLICES:
            raise SliceError(f"more than {MAX_SLICES} slices")
        return True

    def report(self, spec: KubernetesSpec) -> Report:
        """The workers in them."""
        return workers_of(self._by_name, spec)


def workers_of(slices: Mapping[str, Slice], spec: KubernetesSpec) -> Report:
    """Those that are ready, and those that stop."""
    found: dict[str, Seen] = {}
    refused: list[str] = []
    for name, one in sorted(slices.items()):
        try:
            port = _port_of(one, spec.port)
        except SliceError as error:
            if one.endpoints:
                refused.append(f"slice {name[:100]!r}: {error}")
            continue
        for endpoint in one.endpoints or ():
            stopping = endpoint.conditions.terminating is True
            if not (stopping or endpoint.conditions.ready is not False):
                continue
            if not endpoint.addresses:
                continue
            address = endpoint.addresses[0]  # the others are the same endpoint
            host = f"{spec.service}.{spec.namespace}.svc"
            try:
                worker = spec.template.at(address, port, host)
            except WorkerSpecError as error:
                refused.append(f"slice {name[:100]!r}: {address[:100]!r}: {error}")
                continue
            before = found.get(worker.url)
            if before is None or (before.stopping and not stopping):
                found[worker.url] = Seen(worker, stopping)
    return bounded(list(found.values()), refused)


def _port_of(one: Slice, name: str | None) -> int:
    """Raises SliceError."""
    if one.address_type not in ("IPv4", "IPv6"):
        raise SliceError(f"addresses of type {one.address_type[:40]!r}; known: IPv4, IPv6")
    ports = [p for p in one.ports or () if p.port is not None and p.protocol in (None, "TCP")]
    if name is not None:
        ports = [p for p in ports if p.name == name]
    if len(ports) != 1:
        names = ", ".join(repr(p.name) for p in one.ports or ())[:200] or "none"
        wanted = "one of these behind the service: SERVICE:PORTNAME" if name is None else repr(name)
        raise SliceError(f"wanted: {wanted}; its TCP ports: {names}")
    port = ports[0].port
    assert port is not None
    if not 0 < port <= 65_535:
        raise SliceError(f"port {port}")
    return port
