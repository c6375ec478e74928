"""Defines the settings of a router that shares state with others, among them those that must be the
same on all routers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.config.extras import Replicas


@dataclass(frozen=True, slots=True)
class ReplicaTerms:
    """Where this router shares its state, and the values that peers compare with theirs. Lifetime:
    until the next reload.
    """

    url: str  # of Redis, where state is shared
    replicas: Replicas
    alike: Mapping[str, str]  # values that all replicas must have, by key of the configuration
    tokenizer: str | None  # folder whose tokenizer.json they must have alike
    api_keys_file: str | None  # whose tenants' salts they must have alike
