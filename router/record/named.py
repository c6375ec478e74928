"""The model name in a client's request, and the model that was chosen for it."""

from __future__ import annotations

from typing import Any

from policies.record import record


@record
class NamedModel:
    """The model that a naming rule chose for a request. Lifetime: request."""

    asked: str | None  # as the client wrote it; None: its request names no model
    rule: str  # the name or pattern of the rule that chose last
    model: str  # that its workers serve
    revision: str | None = None  # its workers are preferred; None: any revision

    @property
    def renames(self) -> bool:
        """True if workers get another model name than the client's."""
        return self.asked is not None and self.asked != self.model

    @property
    def target(self) -> str:
        """The model, with its revision after an `@` if there is one."""
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    def shown(self) -> dict[str, Any]:
        """Return the names for JSON."""
        return {"asked": self.asked, "rule": self.rule, "target": self.target}
