"""Describes devices: this machine's GPU, other GPUs by name, Triton's interpreter, the CPU.

No other module knows a GPU's number of multiprocessors, or its datasheet.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tnp.util.extras import triton_is_installed

log = logging.getLogger("tnp.auto")


@dataclass(frozen=True)
class Target:
    """Describes a device to plan for: a GPU, here or not, Triton's interpreter, or a CPU."""

    kind: str  # "cuda", "interpreter" or "cpu"
    model: str = ""  # "nvidia-h200": the name of its tuned table
    capability: int = 0  # 90 is 9.0
    multiprocessors: int = 1
    shared_bytes: int = 0  # the most shared memory that a block may use


@dataclass(frozen=True)
class Datasheet:
    """Holds a GPU's datasheet: rates of dense 16-bit products and of device memory."""

    multiprocessors: int
    capability: int
    shared_bytes: int  # shared memory that a block may use (CUDA programming guide)
    flops_per_s: float
    bytes_per_s: float


KB = 1024
# Keys are words of the product name. A longer key comes before a shorter one that it contains.
# Rates are those of dense matrices.
GPUS = {
    "H200": Datasheet(132, 90, 227 * KB, 989.4e12, 4.8e12),
    "H100 PCIe": Datasheet(114, 90, 227 * KB, 756e12, 2.04e12),
    "H100 NVL": Datasheet(132, 90, 227 * KB, 835.5e12, 3.94e12),
    "H100": Datasheet(132, 90, 227 * KB, 989.4e12, 3.36e12),
    "A100-SXM4-80GB": Datasheet(108, 80, 163 * KB, 312e12, 2.04e12),
    "A100 80GB": Datasheet(108, 80, 163 * KB, 312e12, 1.94e12),
    "A100": Datasheet(108, 80, 163 * KB, 312e12, 1.56e12),
    "B200": Datasheet(148, 100, 227 * KB, 2.25e15, 8.0e12),
    "RTX 4090": Datasheet(128, 89, 99 * KB, 165.2e12, 1.008e12),
    "A10G": Datasheet(80, 86, 99 * KB, 70e12, 0.6e12),
    "T4": Datasheet(40, 75, 64 * KB, 65e12, 0.32e12),
    "GH200": Datasheet(132, 90, 227 * KB, 989.4e12, 4.0e12),
    "A30": Datasheet(56, 80, 163 * KB, 165e12, 0.933e12),
    "A40": Datasheet(84, 86, 99 * KB, 149.7e12, 0.696e12),
    "A10": Datasheet(72, 86, 99 * KB, 125e12, 0.6e12),
    "RTX A6000": Datasheet(84, 86, 99 * KB, 154.8e12, 0.768e12),
    "RTX 3090 Ti": Datasheet(84, 86, 99 * KB, 80e12, 1.008e12),
    "RTX 3090": Datasheet(82, 86, 99 * KB, 71e12, 0.936e12),
    "RTX 3070 Ti": Datasheet(48, 86, 99 * KB, 43.5e12, 0.608e12),
    "RTX 3070": Datasheet(46, 86, 99 * KB, 40.6e12, 0.448e12),
    "RTX 2080 Ti": Datasheet(68, 75, 64 * KB, 53.8e12, 0.616e12),
    "L40S": Datasheet(142, 89, 99 * KB, 362e12, 0.864e12),
    "L40": Datasheet(142, 89, 99 * KB, 181e12, 0.864e12),
    "L4": Datasheet(58, 89, 99 * KB, 121e12, 0.3e12),
    "RTX 5090": Datasheet(170, 120, 99 * KB, 209.5e12, 1.792e12),
}
# Compute capabilities of NVIDIA's GPUs from 5.0 on, 75 for 7.5.
CAPABILITIES = (
    *(50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90),
    *(100, 101, 103, 110, 120, 121),
)
# What GPUs can do in hardware, and the first compute capability that can: asynchronous copies to
# shared memory, tensor cores for 8 bits, and copies of whole tiles.
FEATURES = {"cp.async": 80, "e4m3": 89, "TMA": 90}
SMALLEST_SHARED = 48 * KB
CPU, INTERPRETER = Target("cpu"), Target("interpreter")


def slug(name: str) -> str:
    """Returns a product name as it appears in file names: "NVIDIA H200" → "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def datasheet(name: str) -> Datasheet | None:
    """Returns the datasheet of a GPU by its product name or slug, or None if not listed."""
    words = f"-{slug(name)}-"
    return next((known for part, known in GPUS.items() if f"-{slug(part)}-" in words), None)


def named(name: str) -> Target:
    """Returns a GPU by its product name or slug; ValueError names the known ones."""
    known = datasheet(name)
    if known is None:
        raise ValueError(f"unknown GPU {name!r}: choose from {', '.join(GPUS)}")
    return Target("cuda", slug(name), known.capability, known.multiprocessors, known.shared_bytes)


def of_capability(capability: int) -> Target:
    """Returns a GPU of this compute capability, 75 for 7.5."""
    known = [sheet for sheet in GPUS.values() if sheet.capability == capability]
    shared = known[0].shared_bytes if known else SMALLEST_SHARED
    return Target("cuda", "", capability, known[0].multiprocessors if known else 1, shared)


def of_slug(device: str) -> Target:
    """Returns the target of a device as rows name it: "cpu", or a GPU's slug."""
    return here_without_gpu() if device == "cpu" else named(device)


def here_without_gpu() -> Target:
    """Returns the CPU, or Triton's interpreter if TRITON_INTERPRET=1 is set."""
    return INTERPRETER if os.environ.get("TRITON_INTERPRET") == "1" else CPU


_seen: dict[object, Target] = {}


def of_device(device) -> Target:
    """Returns the target of a torch.device, which is looked up once."""
    found = _seen.get(device)
    if found is None:
        found = _seen[device] = _look(device)
    return found


@contextmanager
def on_meta(target: Target) -> Iterator[None]:
    """Makes tensors of the meta device stand for tensors of `target` inside the block."""
    import torch

    device = torch.device("meta")
    before = of_device(device)
    _seen[device] = target
    try:
        yield
    finally:
        _seen[device] = before


def _look(device) -> Target:
    if device.type != "cuda":
        return here_without_gpu()
    import torch

    if not triton_is_installed():
        log.warning("triton is not installed: 'auto' takes PyTorch's operators on %s", device)
    about = torch.cuda.get_device_properties(device)
    shared = getattr(about, "shared_memory_per_block_optin", SMALLEST_SHARED)
    capability = 10 * about.major + about.minor
    return Target("cuda", slug(about.name), capability, about.multi_processor_count, shared)
