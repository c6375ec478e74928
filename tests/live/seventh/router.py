"""A router with support for one more engine: it adds the engine's file and one line in the table of
engines.

    python -m tests.live.seventh.router serve ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

ENGINE, TABLE = "router.engines.seventh", "router.engines.table"
FILE = Path(__file__).with_name("adapter.py")
LINE = "    seventh.ADAPTER,\n"
_BEFORE = "    OPENAI,\n)"
_IMPORT = "from router.engines import "


def registered(table: str) -> str:
    """Return the text of `table.py` with the engine's line and its import added."""
    assert table.count(_BEFORE) == table.count(_IMPORT) == 1
    return table.replace(_BEFORE, LINE + _BEFORE).replace(_IMPORT, f"{_IMPORT}seventh, ")


class _Text(Loader):
    def __init__(self, text: str) -> None:
        self._text = text

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._text, module.__name__, "exec"), vars(module))


class _Overlay(MetaPathFinder):
    """An import finder that loads these modules from changed texts. Lifetime: process."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        text = self._texts.get(name)
        return None if text is None else spec_from_loader(name, _Text(text))


def main() -> int:
    spec = find_spec("router.engines")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    found = PathFinder.find_spec(TABLE, spec.submodule_search_locations)
    assert found is not None
    assert found.origin is not None
    table = Path(found.origin).read_text(encoding="utf-8")
    texts = {ENGINE: FILE.read_text(encoding="utf-8"), TABLE: registered(table)}
    sys.meta_path.insert(0, _Overlay(texts))
    from router.__main__ import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
