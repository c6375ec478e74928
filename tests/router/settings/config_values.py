"""Gives tests a value other than the default for every key of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from router.config.keys import keys_of
from router.settings.schema import Config

WORKER = "http://127.0.0.1:9001"


def another_value(path: str, folder: Path) -> object:
    """Return a valid value of the key that is not its default."""
    (folder / "tokenizer.json").touch()
    special: dict[str, object] = {
        "workers": (WORKER, "http://127.0.0.1:9002,role=decode"),
        "discovery": ("file:/etc/workers.yaml", "dns:pool.internal:8000,every=2,weight=2"),
        "trusted_peers": ("10.0.0.0/8", "::1/128"),
        "event_hosts": ("10.0.0.0/8", "events.local", "ipc", "*"),
        "policy": "hybrid?load_factor=2",
        "tokenizer": str(folder),
        "api_keys_file": str(folder / "tokenizer.json"),
        "admin_keys_file": str(folder / "tokenizer.json"),
        "access_log": str(folder / "access"),
        "request_log": str(folder / "requests"),
        "record": str(folder / "recording"),
        "record_facts": str(folder / "facts"),
        "kv_state": str(folder / "kv"),
        "hot_restart": str(folder / "next"),
        "state": "redis://127.0.0.1:6390/2",
        "replicas.name": "router-a",
        "replicas.fleet": "blue",
        "replicas.flush_s": 0.02,
        "explain": False,
        "model_limits": ("mine:max_requests=8", "other:max_queued_tokens=9,max_requests=2"),
        "triton_admin": "load",
        "names.aliases": ("gpt-4o=llama", "claude-*=llama"),
        "names.targets": ("chat=llama@v1:90,llama@v2:10",),
        "names.missing_model": "refuse",
        "identity.families": ("mine:session=x-thread,group=x-person",),
        "picker.objectives": ("batch=10", "chat=-1"),
        "triton_inputs": ("mine:text=QUESTION", "mine:max_tokens=MOST"),
        "render": "given",
        "renderers": ("http://10.0.0.9:8000", "https://render.local/a"),
        "disaggregation": "never",
        "disaggregation_tpot_ms": 25.0,
        "unknown_paths": "forward",
        "chat_content_format": "openai",
        "chat_template_kwargs": '{"a":1}',
        "log_level": "debug",
        "log_format": "json",
        "policy_fallback": "round_robin",
        "admin_host": "::1",
        "admin_allowed_hosts": ("router-1", "router.example"),
        "session_header": "x-s",
        "deadline_header": "x-d",
        "tenant_header": "x-t",
        "tracing.endpoint": "http://127.0.0.1:4318",
        "tracing.service_name": "other",
        "tracing.sample": 0.5,
    }
    if "tls." in path:
        return str(folder / "tokenizer.json")
    special |= {"host": "0.0.0.0", "picker.host": "0.0.0.0", "waiting.models": ("mine", "a/b")}
    special |= {"port": 8090, "admin_port": 8091}
    special |= {"relay": "python", "tokenizer_mode": "mistral", "harmony_date": "Europe/Berlin"}
    on = "admin_open", "tenants.isolate", "roles.follow", "drain_refuses", "forward_token_ids"
    special |= dict.fromkeys((*on, "chat_drops_unused_tools"), True)
    shares = "ejection.rate", "ejection.max_share", "health.panic_share"
    special |= dict.fromkeys(shares, 0.25)
    return special[path] if path in special else _changed(keys_of(Config)[path].default)


def _changed(default: int | float) -> bool | int | float:
    return not default if isinstance(default, bool) else default + 1


def flags_beside(path: str, folder: Path) -> tuple[str, ...]:
    """Return the other flags that must be given if the key has that value."""
    keys = ("--api-keys-file", str(folder / "tokenizer.json"))
    return keys if path == "triton_admin" else ()


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Return values by dotted path as nested tables of a configuration file, with lists in place of
    tuples.
    """
    whole: dict[str, Any] = {}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        place = whole.setdefault(section, {}) if section else whole
        place[name] = list(value) if isinstance(value, tuple) else value
    return whole
