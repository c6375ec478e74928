"""Reads a YAML file as plain data: its size is limited, and no mapping may have a key twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from router.config.paths import unreadable

MAX_FILE_BYTES = 1 << 20
MAX_NODES = 100_000  # aliases counted as often as they are used


class YamlFileError(ValueError):
    """Raised for a file that is no YAML or breaks these limits. `problems` has a line for each
    thing that is wrong.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file. Raises `YamlFileError` with file and line if it is
    invalid.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise YamlFileError([unreadable(path, error)]) from error
    if len(data) > MAX_FILE_BYTES:
        raise YamlFileError([f"{path}: larger than {MAX_FILE_BYTES} bytes"])
    loader = None
    try:
        loader = yaml.SafeLoader(data)
        root = loader.get_single_node()
        if root is None:
            return None
        problems: list[str] = []
        _check(root, path, problems, MAX_NODES)
        if problems:
            raise YamlFileError(problems)
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise YamlFileError([f"{place}: not YAML: {error.problem}"]) from error
    except (yaml.YAMLError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise YamlFileError([f"{path}: not YAML: {' '.join(why.split())}"]) from error
    except YamlFileError:
        raise
    except ValueError as error:  # such as a date in a thirteenth month
        raise YamlFileError([f"{path}: not YAML: {error}"]) from error
    finally:
        if loader is not None:
            loader.dispose()


def _check(node: yaml.Node, path: Path, problems: list[str], left: int) -> int:
    """Add an error line to `problems` for each repeated key under `node`. `left` is the number of
    nodes that the file may still have; return it less the nodes under `node`.
    """
    left -= 1
    if left < 0:
        raise YamlFileError([f"{path}: more than {MAX_NODES} values, aliases counted"])
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            left = _check(item, path, problems, left)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            place = f"{path}:{key.start_mark.line + 1}"
            if name is None:
                problems.append(f"{place}: a key must be text")
            elif name in seen:
                problems.append(f"{place}: {name} is given twice")
            else:
                seen.add(name)
            left = _check(value, path, problems, left)
    return left
