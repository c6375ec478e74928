"""Checks the values of single keys beyond their types and ranges, and the values of several keys
together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from policies import POLICIES
from policies.load import load
from router.config.items import each
from router.config.keys import ConfigKey
from router.config.paths import near_path
from router.engines.spec import WorkerSpecError, taken
from router.engines.triton_inputs import given_roles
from router.engines.worker_spec import worker_spec_of
from router.events.sources import event_hosts
from router.identity.families import families_of
from router.record.access_log import STDOUT
from router.record.model_limits import model_limits
from router.record.trace_export import check_endpoint
from router.redis.url import parse_redis_url
from router.request.quotas import objectives_of
from router.settings.extras import check_extras, installed
from router.settings.schema import Config
from router.tokens.dates import date_of
from router.tokens.encoders import has_tekken, has_tokenizer_json

NAMES = frozenset({"names.aliases", "names.targets"})  # lists that a file may have as mappings
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?")
NO_GRPC = (
    "gRPC is not installed: pip install 'grpcio>=1.80,<2' 'protobuf>=6.33' "
    "(or '.[grpc]' in the checkout)"
)


def check_value(key: ConfigKey, value: Any) -> Any:
    """Return the value in the key's type, after a check of its range and of the key's own rule.

    Raises ValueError that says what is allowed, or BadItemsError for items of a list.
    """
    if key.path == "workers":
        return _workers(value)
    if key.path == "discovery":
        return _sources(value)
    if key.path in NAMES:
        return _names(key, value)
    if key.path == "chat_template_kwargs" and isinstance(value, dict):  # written out in a file
        value = msgspec.json.encode(value).decode()
    read = key.read(value)
    if key.path in _READERS:
        _READERS[key.path](read)
    elif key.path == "trusted_peers":
        each(read, _check_peer)
    elif key.path == "admin_allowed_hosts":
        return each(read, _host_name)
    elif key.path == "renderers":
        return each(read, _renderer_url)
    elif key.path == "event_hosts":
        each(read, lambda host: event_hosts((host,)))
    elif key.path in ("session_header", "tenant_header", "deadline_header") and read.startswith(
        "x-warmroute-"
    ):
        raise ValueError("x-warmroute-... is the router's own")
    elif key.path == "tokenizer" and read is not None:
        if not has_tokenizer_json(Path(read)) and not has_tekken(Path(read)):
            near = near_path(Path(read))
            raise ValueError(f"{read} is not a folder with a tokenizer.json or tekken.json{near}")
    elif key.path == "state" and read is not None:
        parse_redis_url(read)
    elif "tls." in key.path or key.path in ("api_keys_file", "admin_keys_file"):
        if read is not None and not Path(read).is_file():
            raise ValueError(f"{read} is not a file{near_path(Path(read))}")
    elif key.path == "tracing.endpoint" and read is not None:
        check_endpoint(read)
    elif key.path == "record" and read is not None:
        _check_folder(Path(read))
    elif key.path == "access_log" and read == STDOUT:
        pass
    elif (
        key.path in ("request_log", "access_log", "record_facts", "kv_state", "hot_restart")
        and read is not None
    ):
        _check_place(Path(read))
    return read


def _names(key: ConfigKey, value: Any) -> tuple[str, ...]:
    """Return naming rules as lines; a configuration file may also have them as a mapping."""
    if not value:
        return ()
    if not installed("names"):
        raise ValueError("router/names is not installed, which this needs")
    from router.names.rules import alias_of, lines_of, weighted_of

    aliases = key.path == "names.aliases"
    lines: tuple[str, ...] = key.read(lines_of(value, weights=not aliases))
    each(lines, alias_of if aliases else weighted_of)
    return lines


def _check_names(config: Config) -> list[str]:
    if not (config.names.aliases or config.names.targets) or not installed("names"):
        return []
    from router.names.rules import NameRules

    try:
        NameRules(config.names)
    except ValueError as error:
        return [f"names: {error}"]
    return []


def _renderer_url(text: str) -> str:
    """Return a renderer's URL without a slash at the end. Raises ValueError if the URL is
    malformed.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not http://HOST:PORT or https://HOST:PORT")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError("a renderer's URL has no user, query or fragment")
    return text.rstrip("/")


def _check_grpc(config: Config) -> list[str]:
    if config.grpc_port < 0:
        return []
    problems = []
    if find_spec("grpc") is None or find_spec("google.protobuf") is None:
        problems.append(f"grpc_port: {NO_GRPC}")
    if config.grpc_port == config.port != 0:
        problems.append(f"port and grpc_port are both {config.port}; they must differ")
    if config.grpc_port == config.admin_port != 0 and config.host == config.admin_host:
        problems.append(f"admin_port and grpc_port are both {config.admin_port}; they must differ")
    if not config.grpc_port and (config.reuse_port or config.hot_restart is not None):
        problems.append("grpc_port is 0: name the port, which another router is to share")
    return problems


def _check_picker(config: Config) -> list[str]:
    picker = config.picker
    if picker.port < 0:
        return []
    problems = []
    if find_spec("grpc") is None or find_spec("google.protobuf") is None:
        problems.append(f"picker.port: {NO_GRPC}")
    ports = {
        "port": (config.host, config.port),
        "admin_port": (config.admin_host, config.admin_port),
        "grpc_port": (config.host, config.grpc_port),
        "picker.port": (picker.host, picker.port),
        "picker.health_port": (picker.host, picker.health_port),
    }
    for one, other in combinations(ports, 2):
        if "picker." in other and ports[one] == ports[other] and ports[one][1] > 0:
            problems.append(f"{one} and {other} are both {ports[one][1]}; they must differ")
    if not picker.port and (config.reuse_port or config.hot_restart is not None):
        problems.append("picker.port is 0: name the port, which another router is to share")
    return problems


def check_together(config: Config) -> list[str]:
    """Return an error text for each contradiction between keys that are valid by themselves; empty
    if there is none.
    """
    problems = []
    if config.port == config.admin_port != 0 and config.host == config.admin_host:
        problems.append(f"port and admin_port are both {config.port}; they must differ")
    problems += check_extras(config)
    problems += _check_grpc(config)
    problems += _check_picker(config)
    problems += _check_names(config)
    if config.reuse_port and not config.port:
        problems.append("reuse_port is true and port is 0: name the port that is to be shared")
    if not (config.admin_open or config.admin_keys_file or is_loopback(config.admin_host)):
        problems.append(
            f"admin_host {config.admin_host} is beyond loopback, where whoever reaches the admin "
            "port controls the router: give admin_keys_file, or admin_open: true where a network "
            "policy guards it"
        )
    if config.triton_admin != "off" and config.api_keys_file is None:
        problems.append(
            f"triton_admin is {config.triton_admin}, and whoever reaches the client port could "
            "load and unload models: give api_keys_file"
        )
    if sum(source.startswith("trtllm:") for source in config.discovery) > 1:
        problems.append("discovery has more than one trtllm:, whose keys would differ: merge them")
    if "redis" in config.discovery and config.state is None:
        problems.append("discovery has redis, which needs `state`: the redis:// URL to look at")
    if len(config.workers) > config.limits.workers:
        count = len(config.workers)
        problems.append(f"workers: {count} given, limits.workers is {config.limits.workers}")
    written = {"request_log": config.request_log, "record_facts": config.record_facts}
    written |= {
        "access_log": config.access_log,
        "kv_state": config.kv_state,
        "hot_restart": config.hot_restart,
    }
    for one, other in combinations(written, 2):
        if written[one] is not None and written[one] == written[other]:
            problems.append(f"{one} and {other} are both {written[one]}")
    if config.record is not None and config.request_log is not None:
        problems.append("record and request_log are both given: they hold the same lines")
    if config.recording.part_bytes * 2 > config.recording.total_bytes:
        problems.append(
            f"recording.part_bytes {config.recording.part_bytes} is more than half of "
            f"recording.total_bytes {config.recording.total_bytes}"
        )
    if config.session_header == config.tenant_header:
        problems.append(f"session_header and tenant_header are both {config.session_header}")
    return problems


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _workers(value: Any) -> tuple[str, ...]:
    """Return the specifications of workers in canonical form."""
    seen: dict[str, set[int | None]] = {}
    seats: dict[tuple[str, str], str] = {}

    def text_of(one: object) -> str:
        spec = worker_spec_of(one)
        ranks = seen.setdefault(spec.url, set())
        if ranks and (spec.rank in ranks or None in ranks or spec.rank is None):
            raise WorkerSpecError(f"{spec.name} is given twice")
        if spec.seat is not None:
            other = seats.setdefault(spec.seat, spec.name)
            if other != spec.name:
                raise WorkerSpecError(f"{other} {taken(spec)}")
        ranks.add(spec.rank)
        return str(spec)

    return each(value, text_of)


def _sources(value: Any) -> tuple[str, ...]:
    """Return the names of discovery sources in canonical form."""
    if not value:
        return ()
    if not installed("discovery"):
        raise ValueError("router/discovery is not installed, which this needs")
    from router.discovery.source import TrtllmSpec, parse_source
    from router.discovery.trtllm import read_pool

    seen: set[str] = set()

    def text_of(one: object) -> str:
        if not isinstance(one, str):
            raise ValueError(f"a source is text such as file:PATH; got {type(one).__name__}")
        text = str(spec := parse_source(one))
        if text in seen:
            raise ValueError(f"{text} is given twice")
        seen.add(text)
        if isinstance(spec, TrtllmSpec):
            try:
                read_pool(spec)
            except ValueError as error:
                raise ValueError(f"{spec.path}: {error}") from error
        return text

    return each(value, text_of)


def _check_fallback(spec: str) -> None:
    policy = load(spec)
    if policy.name not in POLICIES or policy.remembers:
        raise ValueError(f"{policy.name} must be a built-in without memory, as least_requests is")


def _check_place(path: Path) -> None:
    if path.is_dir() or not path.name:
        raise ValueError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; create it first{near_path(path.parent)}")


def _check_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; name a folder")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; create it first{near_path(path.parent)}")


def _check_object(text: str) -> None:
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ValueError(f"{error}; give a JSON object such as {{}}") from error


def _check_peer(peer: str) -> None:
    try:
        ip_network(peer)
    except ValueError as error:
        raise ValueError(f"{error}; give a CIDR such as 10.0.0.0/8") from error


def _host_name(text: str) -> str:
    name = text.lower().removesuffix(".")
    if not _HOST_NAME.fullmatch(name):
        raise ValueError(f"{text!r} is no host name; give one such as router-1, without a port")
    return name


# For each key a function that reads its value and raises ValueError if the value is wrong.
_READERS: Mapping[str, Callable[[Any], object]] = MappingProxyType(
    {
        "policy": load,
        "policy_fallback": _check_fallback,
        "triton_inputs": given_roles,
        "model_limits": model_limits,
        "identity.families": families_of,
        "picker.objectives": objectives_of,
        "harmony_date": date_of,
        "chat_template_kwargs": _check_object,
    }
)
