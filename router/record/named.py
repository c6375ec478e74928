"""Holds the model name of a client's request together with the model that was chosen for it."""

from __future__ import annotations

from typing import Any

from policies.record import record


@record
class NamedModel:
    """The client's model name, and the model and revision that a naming rule chose for it.
    Lifetime: request.
    """

    asked: str | None  # as the client wrote it; None: its request names no model
    rule: str  # the name or pattern of the rule that chose last
    model: str  # that its workers serve
    revision: str | None = None  # its workers are preferred; None: any revision

    @property
    def renames(self) -> bool:
        """True if workers get another model name than the client sent."""
        return self.asked is not None and self.asked != self.model

    @property
    def target(self) -> str:
        """The chosen model, followed by `@` and the revision if there is one."""
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    def shown(self) -> dict[str, Any]:
        """Return the client's name, the rule and the chosen model for JSON."""
        return {"asked": self.asked, "rule": self.rule, "target": self.target}
