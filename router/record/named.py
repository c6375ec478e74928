"""The name that a client asked for, and what it was taken for."""

from __future__ import annotations

from typing import Any

from policies.record import record


@record
class NamedModel:
    """The model that a rule of names chose for a request. Lifetime: request."""

    asked: str | None  # as the client wrote it; None: its request names no model
    rule: str  # the name or pattern whose rule chose last
    model: str  # that its workers serve
    revision: str | None = None  # whose workers are asked first; None: any

    @property
    def renames(self) -> bool:
        """True if workers get another name than the client gave."""
        return self.asked is not None and self.asked != self.model

    @property
    def target(self) -> str:
        """The model and its revision in one word."""
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    def shown(self) -> dict[str, Any]:
        """For JSON."""
        return {"asked": self.asked, "rule": self.rule, "target": self.target}
