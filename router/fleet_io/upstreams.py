"""The connections to one worker, as its spec says."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from router.fleet_io.trust import WorkerTrust
from router.http.relay.native import NativeRelay, NativeUpstream
from router.http.relay.reply import RelayLimits
from router.http.relay.upstream import Upstream
from router.worker_spec import WorkerSpec


def upstream_at(
    spec: WorkerSpec,
    clock: Callable[[], float],
    trust: WorkerTrust,
    relay: NativeRelay | None,
    limits: RelayLimits,
) -> Upstream:
    """The connections to the worker of `spec`; through the thread `relay` where it can."""
    parts = urlsplit(spec.url)
    host, base_path = parts.hostname or "", parts.path.rstrip("/")
    tls, server_name = trust.of(spec)
    if relay is not None and tls is None:
        port = parts.port or 80
        return NativeUpstream(relay, host, port, clock, base_path=base_path, limits=limits)
    return Upstream(
        host,
        parts.port or (443 if tls else 80),
        clock,
        base_path=base_path,
        tls=tls,
        server_name=server_name,
        limits=limits,
    )
