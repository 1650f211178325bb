"""The tokens of one pass through the model, of any number of rows, side by side without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.worker.engine.rows import Row


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """T tokens, each with the slot of its row and its position there; `last` are the B whose logits are wanted.

    A row's tokens are neighbours in rising order, and all before them are in the cache. `longest` is the largest
    position plus one, known to the host.
    """

    token_ids: Tensor  # (T,)
    slots: Tensor  # (T,)
    positions: Tensor  # (T,)
    last: Tensor  # (B,)
    longest: int

    @cached_property
    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Slots and positions as NumPy arrays, where they are in the host's memory."""
        return self.slots.numpy(), self.positions.numpy()


def pack(shares: Sequence[tuple[Row, int]], device: torch.device) -> PackedTokens:
    """The next tokens of rows, as many of each as is said; the rows that are then complete have their last wanted."""
    token_ids: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    last: list[int] = []
    for row, count in shares:
        start = row.num_cached
        token_ids += row.known(start, start + count)
        slots += [row.slot] * count
        positions += range(start, start + count)
        if start + count == row.length:
            last.append(len(token_ids) - 1)
    whole = torch.tensor([token_ids, slots, positions]).to(device)
    return PackedTokens(
        token_ids=whole[0],
        slots=whole[1],
        positions=whole[2],
        last=torch.tensor(last, dtype=torch.int64).to(device),
        longest=max(positions) + 1,
    )
