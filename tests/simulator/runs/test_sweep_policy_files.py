"""Tests of the source files that make up a policy: a change in one of them makes another run of a
sweep.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.runs.task import Keys, policy_files
from tests.simulator import synthetic


def test_a_changed_policy_file_gives_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "rules_of_mine"
    folder.mkdir()
    (folder / "__init__.py").touch()
    text = "from rules_of_mine.price import price\n"
    text += "def mine(request, fleet, state):\n    return price\n"
    (folder / "rule.py").write_text(text)
    (folder / "price.py").write_text("price = 1\n")
    asked = synthetic.setup("rules_of_mine.rule:mine|bounded_load")
    files = [path.name for path in policy_files(asked.policy)]
    assert {"rule.py", "price.py", "bounded_load.py"} <= set(files)
    assert "contract.py" not in files
    keys = [Keys().task(asked).key]
    for name in ("price.py", "rule.py"):
        (folder / name).write_text((folder / name).read_text() + "# changed\n")
        keys.append(Keys().task(asked).key)
    assert len(set(keys)) == 3
    other = synthetic.setup("hybrid")
    assert Keys().task(other) == Keys().task(other)
    assert policy_files("no_such_rule") == []
