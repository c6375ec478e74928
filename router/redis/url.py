"""Parses the URL of the shared state: one Redis server, sentinels, or a cluster.

    redis://[USER[:PASSWORD]@]HOST[:6379][/DATABASE]
    redis+sentinel://[USER[:PASSWORD]@]HOST[:26379],HOST[:26379]/SERVICE[/DATABASE]
    redis+cluster://[USER[:PASSWORD]@]HOST[:6379],HOST[:6379]

`rediss`, `rediss+sentinel` and `rediss+cluster` are the same through TLS. Options follow a question
mark, under redis-py's names (8.1): `ssl_ca_certs`, `ssl_certfile` and so on.

No text made here, and no `repr`, contains the user, the password or an option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote

Kind = Literal["server", "sentinel", "cluster"]
Address = tuple[str, int]

MOST_CHARS = 4_096
_MAX_HOSTS = 64
_MAX_DATABASE = 1 << 20
_KINDS = MappingProxyType({"": "server", "+sentinel": "sentinel", "+cluster": "cluster"})
_PORTS = MappingProxyType({"server": 6_379, "sentinel": 26_379, "cluster": 6_379})
_SCHEME = re.compile(r"(redis|rediss)(|\+sentinel|\+cluster)")
_HOST = re.compile(
    r"\[(?P<v6>[0-9A-Fa-f:.]+)\](?::(?P<p6>\d+))?|(?P<host>[^\[\]:]+)(?::(?P<p>\d+))?"
)
_NAME = re.compile(r"[\w.-]{1,253}", re.ASCII)
_USER_INFO = re.compile(r"(\w+://)\S*@")
_SECRET_OPTION = re.compile(r"([?&][\w.-]*password=)[^&\s]*")

_TLS_TEXTS = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_password")
_TLS_OPTIONS = (*_TLS_TEXTS, "ssl_cert_reqs", "ssl_check_hostname", "ssl_ciphers")
_SENTINEL_OPTIONS = MappingProxyType(
    {"sentinel_username": "username", "sentinel_password": "password"}
)
_TRUTHS = MappingProxyType({"true": True, "1": True, "false": False, "0": False})


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A checked Redis URL. Lifetime: process."""

    kind: Kind
    tls: bool
    hosts: tuple[Address, ...]  # of servers, or of sentinels
    service: str = ""  # the master's name with the sentinels
    database: int = 0
    # Arguments of redis-py's connections, secrets among them: those of the server that has the
    # keys (or of a cluster's nodes), and those of the sentinels.
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sentinel_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        """Return the address without user, password and options."""
        kind = "" if self.kind == "server" else f"+{self.kind}"
        hosts = ",".join(address_text(*host) for host in self.hosts)
        tail = f"/{self.service}" if self.service else ""
        tail += f"/{self.database}" if self.database else ""
        return f"redis{'s' if self.tls else ''}{kind}://{hosts}{tail}"


def parse_redis_url(text: str) -> RedisUrl:
    """Return the parsed URL. Raises ValueError that says what is wrong and what to write; it never
    quotes the text.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"longer than {MOST_CHARS} characters")
    scheme, separator, rest = text.partition("://")
    match = _SCHEME.fullmatch(scheme)
    if not separator or match is None:
        raise ValueError(
            "must begin with redis://, redis+sentinel:// or redis+cluster:// (or rediss)"
        )
    kind: Any = _KINDS[match[2]]
    tls = match[1] == "rediss"
    if "#" in rest:
        raise ValueError("has a #; write it as %23 in user and password")
    rest, _, query = rest.partition("?")
    place, _, path = rest.partition("/")
    user_info, at, hosts = place.rpartition("@")
    if "@" in path:
        raise ValueError("has a / in user or password; write it as %2F")
    if "@" in user_info:
        raise ValueError("has an @ in user or password; write it as %40")
    user, _, password = user_info.partition(":")
    options: dict[str, Any] = (
        {"username": unquote(user), "password": unquote(password)} if at else {}
    )
    more, of_sentinels = _options(query, kind, tls)
    found = {name: value for name, value in options.items() if value} | more
    service, database = _path(path, kind)
    addresses = _addresses(hosts, kind)
    return RedisUrl(kind, tls, addresses, service, database, found, of_sentinels)


def shared_secret(text: str, fleet: str) -> str:
    """Return a text that all routers of a fleet can compute, and that their Redis does not store.

    It is made of the password in the URL and the fleet's name; without a password it is not secret.
    Raises ValueError as `parse_redis_url` does.
    """
    password = parse_redis_url(text).options.get("password", "")
    return f"{fleet}\n{password}"


def redacted(text: str) -> str:
    """Return the text with the user, password and secret options of any URL in it removed."""
    return _SECRET_OPTION.sub(r"\1***", _USER_INFO.sub(r"\1***@", text))


def address_text(host: str, port: int) -> str:
    """Return an address in the form HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _addresses(text: str, kind: Kind) -> tuple[Address, ...]:
    parts = text.split(",")
    if len(parts) > (1 if kind == "server" else _MAX_HOSTS):
        several = (
            f"at most {_MAX_HOSTS}" if kind != "server" else "several only with +sentinel, +cluster"
        )
        raise ValueError(f"names {len(parts)} hosts: {several}")
    found = []
    for number, part in enumerate(parts, 1):
        match = _HOST.fullmatch(part)
        host = match and (match["v6"] or match["host"])
        if match is None or not host or not (match["v6"] or _NAME.fullmatch(host)):
            raise ValueError(
                f"host {number} is none: write HOST:PORT or [IPV6]:PORT, "
                "and %3A %2F %40 for : / @ in user and password"
            )
        port = match["p6"] or match["p"]
        if port is not None and not (len(port) <= 5 and 0 < int(port) < 65_536):
            raise ValueError(f"port of host {number} must be 1..65535")
        found.append((host, int(port) if port else _PORTS[kind]))
    return tuple(found)


def _path(path: str, kind: Kind) -> tuple[str, int]:
    """Return the service name and the database number in a URL's path."""
    service = ""
    if kind == "sentinel":
        service, _, path = path.partition("/")
        if not _NAME.fullmatch(service):
            raise ValueError("lacks the service's name: redis+sentinel://HOST:26379/SERVICE")
    if not path:
        return service, 0
    if kind == "cluster":
        raise ValueError("names a database, of which a cluster has only one: leave it out")
    if not (path.isascii() and path.isdigit() and len(path) < 8 and int(path) <= _MAX_DATABASE):
        raise ValueError("the database, behind the last /, must be a number")
    return service, int(path)


def _options(query: str, kind: Kind, tls: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the URL's options for connections to servers, and those for connections to
    sentinels.
    """
    for_servers: dict[str, Any] = {}
    for_sentinels: dict[str, Any] = {}
    known = (*_TLS_OPTIONS, *(_SENTINEL_OPTIONS if kind == "sentinel" else ()))
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            shown = name if _NAME.fullmatch(name) else "one of them"
            raise ValueError(f"option {shown[:64]} is not known; there are: {', '.join(known)}")
        if name in _SENTINEL_OPTIONS:
            for_sentinels[_SENTINEL_OPTIONS[name]] = value
        elif not tls:
            raise ValueError(f"option {name} is of TLS: begin with rediss instead of redis")
        else:
            for_servers[name] = _tls_value(name, value)
    return for_servers, for_sentinels | for_servers


def _tls_value(name: str, value: str) -> Any:
    if name == "ssl_check_hostname":
        if value.lower() not in _TRUTHS:
            raise ValueError(f"option {name} must be true or false")
        return _TRUTHS[value.lower()]
    if name == "ssl_cert_reqs" and value not in ("required", "optional", "none"):
        raise ValueError(f"option {name} must be required, optional or none")
    if not value:
        raise ValueError(f"option {name} is empty")
    return value
