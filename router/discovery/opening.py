"""From a source as it is named to one that can be asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from router.config.schema import Config
from router.discovery.discovery import Discovery
from router.discovery.dns_source import DnsSource
from router.discovery.file_source import FileSource
from router.discovery.source import Source
from router.discovery.spec import DnsSpec, FileSpec, KubernetesSpec, RedisSpec, SourceSpec
from router.fleet_io.manager import FleetManager
from router.replicas.redis_url import RedisUrl, parse_redis_url


def discovery_of(fleet: FleetManager, config: Callable[[], Config]) -> Discovery:
    """What follows the sources of the configuration in force."""

    def opened(spec: SourceSpec) -> Source:
        return open_source(spec, config)

    return Discovery(fleet, opened, lambda: config().discovery_grace_s)


def open_source(spec: SourceSpec, config: Callable[[], Config]) -> Source:
    """The source; `config`: that in force. Raises ValueError where it has not what is needed."""
    match spec:
        case FileSpec(path):
            return FileSource(Path(path))
        case DnsSpec():
            return DnsSource(spec)
        case RedisSpec():
            # Imported here, like the next: each with its client, which few need.
            from router.discovery.redis_source import RedisSource

            return RedisSource(lambda: _redis_of(config()), config().replicas.fleet)
        case KubernetesSpec():
            from router.discovery.kubernetes_source import KubernetesSource

            return KubernetesSource(spec)


def _redis_of(config: Config) -> RedisUrl:
    if config.state is None:
        raise ValueError("the source redis needs `state`")
    return parse_redis_url(config.state)
