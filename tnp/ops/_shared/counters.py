"""Hands out counters to launches whose programs count one another.

A counter is zero before a launch, and the launch leaves it zero. No two launches that may run at
once have the same counters. Launches of a stream follow one another, so they share those of their
stream. A captured launch may be replayed beside any other, so it has its own, for ever.
"""

import torch
from torch import Tensor
from triton.runtime import driver

# Counters for captured launches of a device. Launches captured after these are spent zero theirs.
FOR_CAPTURES = 1 << 18

_of_streams: dict[tuple[int, int], Tensor] = {}
_spare: dict[int, Tensor] = {}  # by device, for captured launches


def zeros_for(x: Tensor, n: int) -> Tensor:
    """Returns at least n int32 zeros on x's device, for a launch on the current stream."""
    if not x.is_cuda:
        return x.new_zeros(n, dtype=torch.int32)
    device = x.get_device()
    if torch.cuda.is_current_stream_capturing():
        spare = _spare.get(device)
        if spare is None or len(spare) < n:
            return x.new_zeros(n, dtype=torch.int32)
        own, _spare[device] = spare.split((n, len(spare) - n))
        return own
    if device not in _spare:  # a capture could not do it: its launches run later
        _spare[device] = x.new_zeros(FOR_CAPTURES, dtype=torch.int32)
    key = device, driver.active.get_current_stream(device)
    found = _of_streams.get(key)
    if found is None or len(found) < n:
        found = _of_streams[key] = x.new_zeros(n, dtype=torch.int32)
    return found
