"""A plug-in that lets SGLang run without CUDA's packages and reports the content of its prefix
tree.

It runs in SGLang's processes: a .pth file imports it before any module of SGLang, and SGLang calls
`register` in each process. The scheduler then listens on the Unix socket in $WARMROUTE_TRUTH and
writes JSON to each client: how many pages the tree has on the device, and, if the tree is in
Python, each page: its tokens from the prompt's begin to its end, and its salt.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The registry has these packages for CUDA only. SGLang imports names from them, and computes with
# PyTorch on a CPU without AMX.
ABSENT = ("torchvision", "sgl_kernel")


class _Name(type):
    """A metaclass whose classes have every attribute; each attribute is another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Name(name, (), {})
        setattr(cls, name, made)
        return made


class _Absent(MetaPathFinder, Loader):
    """An import finder for the missing packages; any name can be imported from them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = functools.partial(getattr, _Name("Absent", (), {}))


sys.meta_path.append(_Absent())


def register() -> None:
    """Let SGLang's prefix tree start the reporting thread; SGLang calls this once in each of its
    processes.
    """
    path = os.environ.get("WARMROUTE_TRUTH")
    if not path:
        return
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    begin = UnifiedRadixCache.__init__

    @functools.wraps(begin)
    def beginning(cache: Any, *args: Any, **kwargs: Any) -> None:
        begin(cache, *args, **kwargs)
        threading.Thread(target=_serve, args=(cache, path), daemon=True).start()

    UnifiedRadixCache.__init__ = beginning


def _serve(cache: Any, path: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        with connection:
            core, size = cache.tree_core, cache.page_size
            slots = core.walk_for_kv_canary(False, False).slot_indices
            try:
                rows = list(_pages(core.root_node, [], size))
            except NotImplementedError:  # the tree in Rust cannot list its nodes
                rows = None
            told = {"pages": len(slots) // size, "rows": rows}
            connection.sendall(json.dumps(told).encode())


def _pages(node: Any, before: list[int], size: int) -> Iterator[dict[str, Any]]:
    for child in list(node.children.values()):
        tokens = before + list(child.key.raw_token_ids())
        if not child.evicted:
            for end in range(len(before) + size, len(tokens) + 1, size):
                yield {"tokens": tokens[:end], "lora": None, "salt": child.key.cache_salt}
        yield from _pages(child, tokens, size)
