"""Whether a machine can run the CUDA kernels, said by name. Reads no torch until it is asked."""

from __future__ import annotations

import logging
from collections.abc import Sequence

TORCH, KVKERNELS = "torch", "kvkernels"  # what computes a part of a model
BACKENDS = ("auto", TORCH, KVKERNELS)
LEAST_CAPABILITY = (8, 0)

log = logging.getLogger(__name__)


def device_lacks(device: str, kernels: Sequence[str]) -> str:
    """What of the machine; empty where it has all `kernels`, and then the library is loaded.

    May build it, which takes minutes. CPUs lack nothing: there operators are plain torch.
    """
    if device == "cpu":
        return ""
    import torch

    from kvkernels.cuda.build import BuildError, find_cuda
    from kvkernels.cuda.library import LaunchError
    from kvkernels.ops.operator import cuda_library

    if not device.startswith("cuda"):
        return f"device {device} (the kernels are for CUDA)"
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"compute capability {found[0]}.{found[1]} (the kernels need {least})"
    try:
        if find_cuda() is None:
            log.warning("building the CUDA kernels, once: this takes minutes")
        functions = cuda_library().functions
        missing = [name for name in kernels if not hasattr(functions, f"wr_{name}")]
    except (BuildError, LaunchError, OSError, AttributeError) as error:
        return f"the kernels' library: {error!s:.500}"
    return f"the kernels' library, which lacks {', '.join(missing)}" if missing else ""
