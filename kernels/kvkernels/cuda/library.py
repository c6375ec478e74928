"""The kernels' library loaded, and its entry points called with tensors.

An entry point takes views (`wr_tensor` of `kernels/cuda/abi.h`), then a stream, checks everything
that the host can know, and launches. It says 0, 1 for what it refuses, 2 for a failed launch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

MAX_DIMS = 5
DTYPES = {
    name: code
    for code, name in enumerate(
        ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "int32", "int64")
    )
}
REFUSED = 1


class RefusedError(ValueError):
    """Arguments that a kernel does not take; begins with the argument's name."""


class LaunchError(RuntimeError):
    """A kernel could not be launched, or an earlier one on the device failed."""


class TensorLike(Protocol):
    """What of a torch tensor is needed here, so that this module does without torch."""

    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def is_cuda(self) -> bool: ...
    def stride(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...


# `wr_tensor`: data, shape and stride in elements, dims, dtype, on_cuda, reserved.
VIEW = struct.Struct(f"@Q{MAX_DIMS}q{MAX_DIMS}q4i")
PADDING = tuple((0,) * (MAX_DIMS - dims) for dims in range(MAX_DIMS + 1))


@cache
def _code_of(dtype: Any) -> int | None:
    return DTYPES.get(str(dtype).removeprefix("torch."))


def view_of(tensor: TensorLike) -> bytes:
    """`tensor` as C sees it, a `wr_tensor`; holds while the tensor's memory does.

    Raises RefusedError for a dtype or rank that C has no word for.
    """
    shape, code = tensor.shape, _code_of(tensor.dtype)
    dims = len(shape)
    if code is None or dims > MAX_DIMS:
        raise RefusedError(
            f"a tensor of {str(tensor.dtype).removeprefix('torch.')} with {dims} dimensions: "
            f"kernels take {', '.join(DTYPES)} with up to {MAX_DIMS}"
        )
    pad = PADDING[dims]
    where = (tensor.data_ptr(), *shape, *pad, *tensor.stride(), *pad)
    return VIEW.pack(*where, dims, code, tensor.is_cuda, 0)


Argument = TensorLike | float | int | None


class KernelLibrary:
    """A loaded library. Lifetime: process; calls from any thread.

    Raises OSError for a file that is no library, LaunchError for one with another ABI.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.functions = ctypes.CDLL(str(path))
        self.functions.wr_last_error.restype = ctypes.c_char_p
        self.functions.wr_tensor_bytes.restype = ctypes.c_int64
        theirs, ours = self.functions.wr_tensor_bytes(), VIEW.size
        if theirs != ours:
            raise LaunchError(f"{path} has tensors of {theirs} bytes, not {ours}: build it anew")

    def call(self, name: str, arguments: Sequence[Argument], stream: int = 0) -> None:
        """Launch `wr_<name>` on `stream` (a cudaStream_t); None is an absent tensor.

        Returns once launched. Raises RefusedError before anything ran, or LaunchError.
        """
        function = getattr(self.functions, f"wr_{name}")
        code = function(*map(_in_c, arguments), ctypes.c_void_p(stream))
        if code:
            said = self.functions.wr_last_error().decode(errors="replace")
            raise (RefusedError if code == REFUSED else LaunchError)(f"{name}: {said}")


def _in_c(argument: Argument) -> Any:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    return view_of(argument)  # bytes go as a pointer to them
