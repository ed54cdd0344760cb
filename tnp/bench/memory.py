"""Measures a step's peak memory: allocator bytes on a GPU, resident bytes on the CPU."""

import re
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures the peak in bytes since the last `reset()`, with parameters and optimizer state.

    CUDA: `torch.cuda.max_memory_allocated`. CPU: the kernel's high-water mark of resident memory,
    minus the memory that the process held when this object was made. So make it before the model.
    The peak is None if the kernel does not let a process reset that mark.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = None if device.type == "cuda" else _resident("VmRSS")
        self._resettable = True

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            self._resettable = False

    def read(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = _resident("VmHWM")
        if self._before is None or peak is None or not self._resettable:
            return None
        return peak - self._before


def _resident(field: str) -> int | None:
    try:
        match = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None
