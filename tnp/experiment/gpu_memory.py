"""Limits the GPU memory of processes, and says how many gates fit side by side.

The environment variable TNP_GPU_GB limits the tensor memory of each process of the workflow, in GB
of 2**30 bytes. `TNP_GPU_GB=16 snakemake --cores 1 all` runs only what would fit a GPU of 16 GB.
Gates, benchmarks and training obey the limit.
"""

from __future__ import annotations

import math
import os

VARIABLE = "TNP_GPU_GB"
GB = 2**30
GATE_GB = 20.0  # memory that a gate may need
MOST_GATES = 4  # more gates at once are of no use
# CUDA contexts of idle processes take this much. It does not count as memory in use.
_UNIMPORTANT_GB = 2.0


class Busy(RuntimeError):
    """Says how much GPU memory other processes hold that this one needs."""


def limit_gb() -> float | None:
    """Returns the GB that TNP_GPU_GB allows a process, or None if it is not set.

    Raises:
        ValueError: TNP_GPU_GB is no positive number.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not (limit > 0 and math.isfinite(limit)):
        raise ValueError(f"{VARIABLE} is {text!r}: it must be a number of GB above 0, such as 16")
    return limit


def apply_limit() -> None:
    """Limits PyTorch's memory on the first GPU in this process to what TNP_GPU_GB allows."""
    limit = limit_gb()
    if limit is None:
        return
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit * GB / total), 0)


def gates_at_once(free_gb: float | None, limit: float | None = None) -> int:
    """Returns how many gates run side by side: at least one, at most `MOST_GATES`.

    Args:
        free_gb: free memory of the GPU, in GB; None without a GPU, where memory does not matter.
        limit: GB that each process may take, or None for all.
    """
    if free_gb is None:
        return MOST_GATES
    need = GATE_GB if limit is None else min(GATE_GB, limit)
    return max(1, min(MOST_GATES, int(free_gb / need)))


def why_it_does_not_fit(error: Exception) -> str | None:
    """Returns why the problem is too large for this GPU, or for TNP_GPU_GB.

    Returns None if `error` is not about GPU memory.

    Raises:
        Busy: other processes hold memory, so the problem might fit without them.
    """
    from tnp.experiment.failures import classify

    status, reason = classify(error)
    if status != "oom":
        return None
    import torch

    free, total = torch.cuda.mem_get_info()
    return judged(free / GB, torch.cuda.memory_reserved() / GB, total / GB, limit_gb(), reason)


def judged(
    free_gb: float, ours_gb: float, total_gb: float, limit: float | None, reason: str
) -> str:
    """Returns the sentence of `why_it_does_not_fit`, or raises its `Busy`.

    Args:
        free_gb: free memory of the GPU.
        ours_gb: memory that this process has reserved.
        total_gb: memory of the GPU.
        limit: GB that TNP_GPU_GB allows, or None.
        reason: PyTorch's message.
    """
    reachable = free_gb + ours_gb
    if limit is not None and limit <= reachable:
        return f"it does not fit {limit:g} GB, which {VARIABLE} allows: {reason}"
    others = total_gb - reachable
    if others > _UNIMPORTANT_GB:
        raise Busy(f"other processes hold {others:.0f} of the GPU's {total_gb:.0f} GB: {reason}")
    return f"it does not fit this GPU of {total_gb:.0f} GB: {reason}"
