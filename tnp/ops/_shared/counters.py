"""Hands out counters to launches whose programs count one another.

A counter is zero before a launch, and the launch leaves it zero. No two launches that may run at
once have the same counters. Launches of a stream follow one another, so they share those of their
stream. A captured launch may be replayed beside any other, so it has its own, for ever.

A device has a reserve of zeros. When it is spent, or if the very first launch is captured, counters
are zeroed by a launch of their own.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2
from triton.runtime import driver

RESERVE = 1 << 18  # counters of a device: 1 MB
LINE = 32
OF_STREAM = 1024  # counters that a stream takes at first

_lock = Lock()
_left: dict[int, Tensor] = {}  # of the reserve, by device
_of_streams: dict[tuple[int, int], Tensor] = {}


def zeros_for(x: Tensor, n: int) -> Tensor:
    """Returns at least n int32 zeros on x's device, for a launch on the current stream."""
    if not x.is_cuda:
        return x.new_zeros(n, dtype=torch.int32)
    device, found = x.get_device(), None
    if torch.cuda.is_current_stream_capturing():
        found = _taken(device, n)
    else:
        key = device, driver.active.get_current_stream(device)
        found = _of_streams.get(key)
        if found is None or len(found) < n:
            with _lock:
                if device not in _left:
                    _left[device] = _reserve(device)
            found = _taken(device, max(OF_STREAM, next_power_of_2(n)))
            if found is not None:
                _of_streams[key] = found
    return x.new_zeros(n, dtype=torch.int32) if found is None else found


def _taken(device: int, n: int) -> Tensor | None:
    """Takes n counters of the reserve, in whole lines of cache, or none if it has fewer."""
    n = cdiv(n, LINE) * LINE
    with _lock:
        left = _left.get(device)
        if left is None or len(left) < n:
            return None
        _left[device] = left[n:]
        return left[:n]


def _reserve(device: int) -> Tensor:
    """Returns zeros in ordinary memory. The calling thread's may be a pool of PyTorch's graphs."""

    def made() -> Tensor:
        zeros = torch.zeros(RESERVE, dtype=torch.int32, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
        return zeros

    with ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(made).result()
