"""Running out of memory, told from other failures."""

from __future__ import annotations

import torch


def is_out_of_memory(error: Exception) -> bool:
    """True for the device's and for the host's; torch's allocator on the host raises no type of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def release_unused_memory() -> None:
    """Give back what torch keeps of a device's memory for later."""
    torch.cuda.empty_cache()
