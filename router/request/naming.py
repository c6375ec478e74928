"""The interface to an extra that knows model names besides those of workers' models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from router.body.paths import Path
from router.record.named import NamedModel
from router.record.request_record import RequestRecord
from router.upstream.edited_reply import Editor


class NameResolver(Protocol):
    """The model names that clients may use. Lifetime: process."""

    async def choose(
        self, asked: str, tenant: str | None, session: str | None, body: bytes
    ) -> NamedModel | None:
        """Return the target of a name now; None for a name without a rule.

        The same tenant and session get the same target, as long as weights stay and the target has
        workers; without a session, the same beginning of a conversation does.
        """

    def open_models(self, asked: str) -> frozenset[str]:
        """Return the models that a name may mean and that workers take requests for now."""

    def stands_for(self, name: str) -> str:
        """Return a model that a name may mean, preferably one with workers now."""

    def hidden_models(self) -> list[str]:
        """Return the models that workers serve under a name whose rule means other models."""

    def with_cards(self, cards: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the cards of all models, and those of names besides them."""

    def card(
        self, name: str, of_model: Callable[[str], dict[str, Any] | None]
    ) -> dict[str, Any] | None:
        """Return the card of a name that has a rule of its own; None for any other.

        of_model: returns the card of a model; None without workers.
        """

    def count(self, record: RequestRecord) -> None:
        """Count a request that is over, whose model's name had a rule."""

    def editor(self, named: NamedModel, path: Path) -> Editor:
        """Return the editor that puts the requested name into the answer of a path."""
