"""Numbers of the host on a device, and back, without waiting for what the device computes.

A plain copy waits for everything that was launched before it. From and to pinned memory it takes
its turn behind that, while the host goes on (CUDA C++ Programming Guide 12, 3.2.8).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def is_cuda(device: str | torch.device) -> bool:
    """Whether what is launched there computes later."""
    return torch.device(device).type == "cuda"


def host_bytes(count: int, device: str | torch.device) -> torch.Tensor:
    """uint8[count] zeros on the host, from where they go to `device` without a wait."""
    return torch.zeros(count, dtype=torch.uint8, pin_memory=is_cuda(device))


def placed(
    values: Sequence[float] | torch.Tensor, dtype: torch.dtype, device: str | torch.device
) -> torch.Tensor:
    """`values` as a tensor on `device`."""
    made = torch.as_tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if is_cuda(device) else made.to(device)


def fetched(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the host: there when an event recorded after this call has passed."""
    if tensor.device.type == "cpu":
        return tensor
    kept = torch.empty_like(tensor, device="cpu", pin_memory=is_cuda(tensor.device))
    return kept.copy_(tensor, non_blocking=True)
