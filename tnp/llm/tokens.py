"""Holds the tokens that a loop writes, on the device."""

from __future__ import annotations

import torch
from torch import Tensor


class Tokens:
    """Holds each sequence's last token, and the tokens since the host last looked.

    Args:
        batch: how many sequences.
        n: the most tokens between two looks.
        stops: ids that end a sequence.
        pad: the id behind a sequence's end.
        device: where they are.
    """

    def __init__(
        self, batch: int, n: int, stops: tuple[int, ...], pad: int, device: torch.device
    ) -> None:
        self.stops = torch.tensor(stops, device=device) if stops else None
        self.pad = pad
        self.ids = torch.zeros(batch, dtype=torch.int64, device=device)
        self.block = torch.zeros(n, batch, dtype=torch.int64, device=device)
        self.place = torch.zeros(batch, dtype=torch.int64, device=device)  # in the block
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)

    def begin_block(self) -> None:
        """Writes the next tokens to the block from its first row on."""
        self.place.zero_()

    def add(self, chosen: Tensor) -> None:
        """Adds the chosen ids, int64 [B]; `pad` where a sequence has ended."""
        if self.stops is not None:
            chosen = chosen.masked_fill(self.ended, self.pad)
            self.ended |= (chosen[:, None] == self.stops).any(1)
        self.ids.copy_(chosen)
        self.block.scatter_(0, self.place[None], chosen[None])
        self.place += 1
