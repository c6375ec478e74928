"""Defines the interface to the extra that knows model names besides the names of workers'
models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from router.body.paths import Path
from router.record.named import NamedModel
from router.record.request_record import RequestRecord
from router.upstream.edited_reply import Editor


class NameResolver(Protocol):
    """Finds the models for the model names that clients may use. Lifetime: process."""

    async def choose(
        self, asked: str, tenant: str | None, session: str | None, body: bytes
    ) -> NamedModel | None:
        """Return the model to which a name is mapped now; None for a name without a rule.

        The same tenant and session get the same model, as long as weights are unchanged and the
        model has workers; without a session, requests with the same beginning of a conversation do.
        """

    def open_models(self, asked: str) -> frozenset[str]:
        """Return the models to which a name may be mapped and whose workers take requests now."""

    def stands_for(self, name: str) -> str:
        """Return a model to which a name may be mapped, preferably one that has workers now."""

    def hidden_models(self) -> list[str]:
        """Return the models whose workers clients cannot reach by name, because a rule maps that
        name to other models.
        """

    def with_cards(self, cards: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the cards of all models, and after them the cards of names with rules."""

    def card(
        self, name: str, of_model: Callable[[str], dict[str, Any] | None]
    ) -> dict[str, Any] | None:
        """Return the card of a name that has its own rule; None for any other name.

        `of_model` returns the card of a model, or None if it has no workers.
        """

    def count(self, record: RequestRecord) -> None:
        """Count a request that has ended, if a rule applied to its model name."""

    def editor(self, named: NamedModel, path: Path) -> Editor:
        """Return the editor that puts the requested name into the answer of a request to `path`."""
