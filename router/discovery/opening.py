"""Opens the sources of workers that the configuration names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from router.discovery.plain_sources import DnsSource, FileSource
from router.discovery.source import (
    DnsSpec,
    FileSpec,
    InferencePoolSpec,
    KubernetesSpec,
    RedisSpec,
    TrtllmSpec,
    parse_source,
)
from router.discovery.trtllm import TrtllmSource
from router.events.sources import EventHosts
from router.fleet.sources import Source
from router.redis.url import RedisUrl, parse_redis_url


@dataclass(frozen=True, slots=True)
class DiscoveryTerms:
    """The values of the configuration that sources of workers use besides their own specs.
    Lifetime: until the next reload.
    """

    redis_url: str | None  # of the state that replicas share
    fleet: str  # the name of the fleet whose replicas share the state
    event_hosts: EventHosts  # besides a worker's own, that may send its events
    objectives: bool  # of an InferencePool are read, too


def open_source(text: str, terms: Callable[[], DiscoveryTerms]) -> Source:
    """Return the source that `text` names. Raises ValueError if `terms` lack what the
    source needs.
    """
    match spec := parse_source(text):
        case FileSpec(path):
            return FileSource(Path(path))
        case DnsSpec():
            return DnsSource(spec)
        case TrtllmSpec():
            return TrtllmSource(spec)
        case RedisSpec():
            # Imported here, like the next: each with its client, which few need.
            from router.discovery.redis_source import RedisSource

            return RedisSource(
                lambda: _redis_of(terms()),
                terms().fleet,
                hosts_now=lambda: terms().event_hosts,
            )
        case KubernetesSpec():
            from router.discovery.kubernetes_source import KubernetesSource

            return KubernetesSource(spec)
        case InferencePoolSpec():
            from router.discovery.kubernetes_source import InferencePoolSource

            return InferencePoolSource(spec, objectives=terms().objectives)


def _redis_of(terms: DiscoveryTerms) -> RedisUrl:
    if terms.redis_url is None:
        raise ValueError("the source redis needs `state`")
    return parse_redis_url(terms.redis_url)
