"""What is wrong with a model directory, in a line for the person who named it."""

from __future__ import annotations

from pathlib import Path


class ModelError(ValueError):
    """A model cannot be served: which file, what in it, and what to do."""

    def __init__(self, path: Path, what: str, remedy: str) -> None:
        super().__init__(f"{path}: {what}; {remedy}")
        self.path = path
