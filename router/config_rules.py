"""What a type and a range cannot say: rules of single keys, rules between keys, what is fixed."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from types import MappingProxyType
from typing import Any

from policies.load import load
from router.config import Config
from router.config_keys import Key
from router.worker_spec import WorkerSpecError, parse_worker_spec, worker_spec_of

_BOUND = "the socket is bound at start; restart the router"
_SIZED = "sized at start; restart the router"
_BUILT = "read once at start; restart the router"

# Keys a reload cannot change, and why. Every other one takes effect with the next request.
FIXED = MappingProxyType(
    {
        **dict.fromkeys(("host", "port", "admin_host", "admin_port"), _BOUND),
        **dict.fromkeys(
            ("limits.workers", "limits.index_entries", "limits.speculative_entries"), _SIZED
        ),
        **dict.fromkeys(
            (
                "seed",
                "tokenizer",
                "tenant_header",
                "trusted_peers",
                "api_keys_file",
                "log_level",
                "limits.body_bytes",
                "limits.header_bytes",
                "limits.inflight_requests",
                "limits.hold_requests",
                "limits.hold_s",
                "timeouts.keep_alive_s",
                "timeouts.shutdown_s",
                "timeouts.speculative_s",
                "timeouts.approximate_s",
                "ejection.failures",
                "ejection.recover_s",
            ),
            _BUILT,
        ),
    }
)


def check_value(key: Key, value: Any) -> Any:
    """The value in the key's type, checked by its range and by its own rule. Raises ValueError."""
    if key.path == "workers":
        return _workers(value)
    read = key.read(value)
    if key.path == "policy":
        load(read)
    elif key.path == "trusted_peers":
        for number, peer in enumerate(read):
            try:
                ip_network(peer)
            except ValueError as error:
                raise ValueError(f"[{number}]: {error}; a CIDR such as 10.0.0.0/8") from error
    elif key.path in ("session_header", "tenant_header") and read.startswith("x-warmroute-"):
        raise ValueError("x-warmroute-... is the router's own")
    elif key.path == "tokenizer" and read is not None:
        if not (Path(read) / "tokenizer.json").is_file():
            raise ValueError(f"{read} is not a folder with a tokenizer.json")
    elif key.path == "api_keys_file" and read is not None and not Path(read).is_file():
        raise ValueError(f"{read} is not a file")
    return read


def check_together(config: Config) -> list[str]:
    """What is wrong between keys that are right each by itself; empty when nothing is."""
    problems = []
    if config.port == config.admin_port != 0 and config.host == config.admin_host:
        problems.append(f"port and admin_port are both {config.port}; they must differ")
    if len(config.workers) > config.limits.workers:
        count = len(config.workers)
        problems.append(f"workers: {count} given, limits.workers is {config.limits.workers}")
    seen: set[str] = set()
    for number, text in enumerate(config.workers):
        url = parse_worker_spec(text).url
        if url in seen:
            problems.append(f"workers[{number}]: {url} is given twice")
        seen.add(url)
    if config.session_header == config.tenant_header:
        problems.append(f"session_header and tenant_header are both {config.session_header}")
    return problems


def _workers(value: Any) -> tuple[str, ...]:
    """Canonical texts of the workers given."""
    texts = []
    for number, one in enumerate(value):
        try:
            texts.append(str(worker_spec_of(one)))
        except WorkerSpecError as error:
            raise ValueError(f"[{number}]: {error}") from error
    return tuple(texts)
