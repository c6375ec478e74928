"""Makes torchvision built for CUDA importable beside PyTorch for CPUs, in vLLM's processes.

On import, torchvision describes two operators of its library, which cannot be loaded here; this
hook registers them with PyTorch first. It is copied to `sitecustomize.py`, which Python imports at
its start.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

_OPERATORS = ("nms", "qnms")
_ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        for operator in _OPERATORS:
            torch.library.define(f"torchvision::{operator}", _ARGUMENTS)


sys.meta_path.insert(0, _Finder())
