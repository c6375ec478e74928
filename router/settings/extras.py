"""Knows the router's extras, which are packages that may be left out, and the configuration keys
that need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType

from router.config.keys import value_at
from router.settings.schema import Config

# By extra: the keys that ask for it where their values are not the defaults.
_ASKED_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "admin": ("admin_port", "admin_host", "admin_keys_file", "admin_tls.cert"),
        "discovery": ("discovery",),
        "doctor": (),
        "kserve": ("grpc_port", "triton_inputs", "triton_admin"),
        "migration": ("migration.moves",),
        "names": ("names.aliases", "names.targets"),
        "picker": ("picker.port",),
        "replicas": ("state", "hot_restart"),
        "restart": ("kv_state", "hot_restart"),
    }
)
EXTRAS = tuple(_ASKED_BY)
# Extras that are on by default, and what a router without one does not serve.
_BY_DEFAULT: Mapping[str, str] = MappingProxyType(
    {
        "admin": "the admin port, with /metrics, is not served",
        "doctor": "/doctor of the admin port is not served",
        "kserve": "KServe's paths below /v2 are not served",
    }
)


@cache
def installed(extra: str) -> bool:
    """Return whether the package of an extra is installed."""
    return find_spec(f"router.{extra}") is not None


def not_served() -> list[str]:
    """Return a line for each missing extra that says what is not served without it, even if no
    configuration key asks for it.
    """
    lacking = ((extra, what) for extra, what in _BY_DEFAULT.items() if not installed(extra))
    return [f"{what}: router/{extra} is not installed" for extra, what in lacking]


def check_extras(config: Config) -> list[str]:
    """Return an error text for each configuration key that needs a missing extra."""
    usual = Config()
    return [
        f"{key}: router/{extra} is not installed, which this needs"
        for extra, keys in _ASKED_BY.items()
        for key in keys
        if not installed(extra) and value_at(config, key) != value_at(usual, key)
    ]
