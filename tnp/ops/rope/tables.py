"""Makes the tables of cos and sin that rotary embeddings read."""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from tnp.dispatch.spec import ALL_FLOATS
from tnp.ops.rope.definition import THETA
from tnp.util.checks import require_count, require_number, require_real, visible_device

if TYPE_CHECKING:
    import torch

KEPT = 8  # pairs of tables; 131,072 positions of D = 128 take 64 MiB in float32


def rotary_tables(
    n_positions: int,
    head_dim: int,
    base: float = THETA,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin [n_positions, D/2] of angles position · base^(−2i/D), for `rope`.

    Angles are float64, and each number is rounded once. Equal arguments give the same two tensors
    again, so never write to them. The last 8 pairs are kept. Call it outside `torch.compile` and
    before a CUDA graph is captured.

    Args:
        n_positions: positions 0 to n_positions − 1.
        head_dim: D, even.
        base: a number above 1, a model's `rope_theta`.
        device: None is PyTorch's default device.
        dtype: None is float32. `rope` takes float32 or q's dtype.

    Raises:
        ValueError: an argument is out of its range, or the device is not here.
        RuntimeError: somebody wrote to the tables of these arguments.
    """
    import torch

    n_positions = require_count("n_positions", n_positions, 1)
    head_dim = require_count("head_dim", head_dim, 2)
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}: it must be even, for pairs of elements")
    require_number("base", base)
    if not 1 < require_real("base", base) < inf:
        raise ValueError(f"base is {base!r}: it must be finite and above 1")
    dtype = torch.float32 if dtype is None else dtype
    if str(dtype).removeprefix("torch.") not in ALL_FLOATS or isinstance(dtype, str):
        raise ValueError(f"dtype is {dtype!r}: choose one of torch.{', torch.'.join(ALL_FLOATS)}")
    device = visible_device(torch.get_default_device() if device is None else device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    kept = _tables(n_positions, head_dim, float(base), device, dtype)
    if kept.versions != (kept.cos._version, kept.sin._version):
        raise RuntimeError(
            f"the tables of {n_positions} positions and head_dim {head_dim} were written to: "
            "they are shared, so clone them first"
        )
    return kept.cos, kept.sin


class _Kept(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor
    versions: tuple[int, int]  # PyTorch counts what is written


@lru_cache(KEPT)
def _tables(
    n_positions: int, head_dim: int, base: float, device: torch.device, dtype: torch.dtype
) -> _Kept:
    """Computes on the CPU, so that all devices have equal numbers."""
    import torch

    like = {"dtype": torch.float64, "device": "cpu"}
    with torch.inference_mode(False):  # autograd refuses to save inference tensors
        frequencies = base ** (-torch.arange(0, head_dim, 2, **like) / head_dim)
        angles = torch.arange(n_positions, **like)[:, None] * frequencies
        cos, sin = (table.to(device, dtype) for table in (angles.cos(), angles.sin()))
        return _Kept(cos, sin, (cos._version, sin._version))
