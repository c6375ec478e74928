"""What routers that share state must have in common, and how they differ.

Else a prefix has one hash here and another one there, a session or a tenant is somebody else's, or
two rules of placing requests work against each other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from router.config.keys import text_of, value_at
from router.config.schema import Config
from router.keys.key_file import KeyFileError, read_keys

log = logging.getLogger(__name__)

# Keys of the configuration whose values are told as they are.
PLAIN = (
    "policy",
    "session_header",
    "tenant_header",
    "tenants.isolate",
    "chat_content_format",
    "chat_template_kwargs",
    "chat_drops_unused_tools",
)
# Told as digests: of the tokenizer's file; of tenants' names and salts in the file of keys.
TOKENIZER = "tokenizer"
SALTS = "api_keys_file (tenants' salts)"
VERSION = "version of messages"
_DIGEST_CHARS = 16
_MOST_CHARS = 200
_ABSENT = "nothing"


class ReplicaRefusedError(ValueError):
    """This router may not share state with one that runs."""


def terms_of(config: Config, speaks: int) -> dict[str, str]:
    """What peers must have alike, `speaks` among it: our version of messages.

    Reads the tokenizer's file and the file of keys.
    """
    terms = {VERSION: str(speaks)}
    terms |= {path: _short(text_of(value_at(config, path))) for path in PLAIN}
    terms[TOKENIZER] = "none"
    if config.tokenizer is not None:
        terms[TOKENIZER] = _digest_of(Path(config.tokenizer) / "tokenizer.json")
    terms[SALTS] = "none" if config.api_keys_file is None else _salts(Path(config.api_keys_file))
    return terms


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each key in which they differ, and how."""
    for key in sorted({*ours, *theirs}):
        here, there = ours.get(key, _ABSENT), theirs.get(key, _ABSENT)
        if here != there:
            yield key, f"{key} is {here!r} here and {there!r} there"


class Disagreements:
    """Between us and those who are here. Lifetime: process."""

    def __init__(self) -> None:
        self.now: dict[str, dict[str, str]] = {}  # peer -> key -> how it differs

    def look(self, ours: Mapping[str, str], peers: Mapping[str, Mapping[str, str]]) -> None:
        """As of now; what is new is logged."""
        found = {name: dict(differences(ours, theirs)) for name, theirs in peers.items()}
        for name, how in found.items():
            before = self.now.get(name, {})
            if new := [text for key, text in how.items() if before.get(key) != text]:
                log.error("replica %s differs: %s; give both the same", name, "; ".join(new))
            elif before and not how:
                log.info("replica %s agrees again", name)
        self.now = {name: how for name, how in found.items() if how}


def refusal(peer: str, how: str) -> ReplicaRefusedError:
    """One line: who differs, how, and what to do."""
    return ReplicaRefusedError(
        f"state: replica {peer} runs and differs: {how}. Give both the same, or start this router "
        "with another replicas.fleet, or stop the other one first"
    )


def _short(text: str) -> str:
    if len(text) <= _MOST_CHARS:
        return text
    return f"sha256:{sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]}"


def _digest_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            digest = sha256()
            while part := file.read(1 << 20):
                digest.update(part)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"sha256:{digest.hexdigest()[:_DIGEST_CHARS]}"


def _salts(path: Path) -> str:
    """Keys may come and go on one replica before the other; caches of a tenant stay its own."""
    try:
        lines = read_keys(path)
    except KeyFileError:
        return "cannot be read"
    pairs = sorted(
        {(line.terms.tenant or "", line.terms.salt or "") for line in lines if line.terms.salt}
    )
    return f"sha256:{sha256(repr(pairs).encode()).hexdigest()[:_DIGEST_CHARS]}" if pairs else "none"
