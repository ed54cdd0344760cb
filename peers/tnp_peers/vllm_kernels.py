"""Runs Marlin and Machete out of vLLM's shared library `_C_stable_libtorch`.

The library is loaded by its path in package vllm, which is not imported. So a folder `vllm` with
this file alone is enough, beside the package's metadata. Layouts are those of vLLM 0.26.0, in
`model_executor/kernels/linear/mixed_precision` and `quantization/utils/marlin_utils.py`.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tnp.dispatch.spec import Call, Implementation, Reason, on_cuda
from tnp.ops.quantized_linear.definition import OF_16_BITS, OPTIONS
from tnp.ops.quantized_linear.packing import MIDDLE, bits_of, pack, unpack
from tnp.ops.quantized_linear.torch_forms import kept
from tnp_peers.support import both, multiples, rows, words

LIBRARY = "_C_stable_libtorch*.so"


class Marlin(NamedTuple):
    """Holds a weight as `marlin_gemm` reads it.

    `none` has no element: it stands for an order of inputs. Nor has `zeros`, for symmetric codes.
    """

    weight: Tensor  # int32 [n_in / 16, n_out · bits / 2], tiles of 16 × 64 codes
    scales: Tensor  # [n_groups, n_out]
    zeros: Tensor  # int32 [n_groups, n_out / 8]
    bias: Tensor | None
    none: Tensor
    workspace: Tensor  # int32, zero between launches


class Machete(NamedTuple):
    """Holds a weight as `machete_mm` reads it."""

    weight: Tensor  # int32 [n_in · bits / 32, n_out]
    scales: Tensor  # [n_groups, n_out]
    zeros: Tensor | None  # −zero · scale, likewise


def _library() -> Path | None:
    """Returns the path of vLLM's library, or None."""
    spec = find_spec("vllm")
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for folder in folders for path in Path(folder).glob(LIBRARY)), None)


@cache
def _operators() -> Any:
    """Returns vLLM's operators, after loading their library."""
    torch.ops.load_library(str(_library()))
    return torch.ops._C


def _type(bits: int, symmetric: bool) -> int:
    """Returns vLLM's number of an unsigned integer type (scalar_type.py).

    From the low bits on: 8 of the exponent, 8 of the mantissa, a sign, 32 of the code that stands
    for 0, a flag, and how NaN is written (1: as IEEE does).
    """
    return bits << 8 | (MIDDLE[bits] if symmetric else 0) << 17 | 1 << 50


def _of_tiles(x: Tensor, grouped: bool) -> Tensor:
    """Returns scales or zero points [n_groups, n_out] in the order in which Marlin's threads read.

    Groups: columns of 64 outputs, by their place in 8, then by eights. A row's: columns of 32, by
    their pair in 8, then by eights, for they multiply sums.
    """
    if grouped:
        return x.unflatten(1, (-1, 8, 8)).transpose(2, 3).flatten(1).contiguous()
    return x.unflatten(1, (-1, 4, 4, 2)).transpose(2, 3).flatten(1).contiguous()


def plan_marlin(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Marlin:  # fmt: skip
    """Returns Marlin's layout of a weight. Zero points are packed as our codes of 4 bits are."""
    bits, device = bits_of(weight), weight.device
    none = torch.empty(0, dtype=torch.int32, device=device)
    tiles = _operators().gptq_marlin_repack(
        words(unpack(weight), bits).t().contiguous(), none, x.shape[-1], len(weight), bits, False
    )
    n_programs = (
        torch.cuda.get_device_properties(device).multi_processor_count if weight.is_cuda else 1
    )
    return Marlin(
        tiles,
        _of_tiles(scales.t(), grouped=scales.shape[1] > 1),
        none if zeros is None else pack(_of_tiles(zeros.t(), grouped=True), bits),
        None if bias is None else _of_tiles(bias[None].to(x.dtype), grouped=False)[0],
        none,
        torch.zeros(n_programs, dtype=torch.int32, device=device),
    )


def marlin(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs `marlin_gemm` as vLLM does by default: parts are added in float32, without atomics."""
    of = kept(plan_marlin, x, weight, scales, zeros, bias)
    flat, (n_out, n_in) = rows(x), (len(weight), x.shape[-1])
    y = _operators().marlin_gemm(
        flat, None, of.weight, of.bias, of.scales, None, None, of.zeros, of.none, of.none,
        of.workspace, _type(bits_of(weight), zeros is None), len(flat), n_out, n_in,
        True, False, True, False,
    )  # fmt: skip
    return y.view(*x.shape[:-1], n_out)


def plan_machete(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Machete:  # fmt: skip
    """Returns Machete's layout of a weight. A zero point is rounded with its scale to x's dtype."""
    bits = bits_of(weight)
    tiles = _operators().machete_prepack_B(
        words(unpack(weight), bits).t(), x.dtype, _type(bits, zeros is None), x.dtype
    )
    points = None if zeros is None else -1.0 * scales * zeros.to(x.dtype)
    # A copy gives a single group its usual strides, which `contiguous` does not.
    by_groups = [one if one is None else one.t().clone(memory_format=torch.contiguous_format)
                 for one in (scales, points)]  # fmt: skip
    return Machete(tiles, *by_groups)


def machete(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs `machete_mm`, with the schedule that it chooses."""
    of = kept(plan_machete, x, weight, scales, zeros)
    n_groups = scales.shape[1]
    y = _operators().machete_mm(
        rows(x), of.weight, _type(bits_of(weight), zeros is None), None, of.scales, of.zeros,
        x.shape[-1] // n_groups if n_groups > 1 else -1, None, None, None,
    )  # fmt: skip
    y = y if bias is None else y.add_(bias.to(y.dtype))
    return y.view(*x.shape[:-1], len(weight))


def _missing() -> Reason:
    return None if _library() else f"package vllm has no file {LIBRARY}, which holds the kernel"


def _marlin_takes(call: Call) -> Reason:
    p = call.problem
    if p["bits"] == 8 and p["zeros"]:
        return "it takes zeros with bits=4, not with 8"
    n_in, n_out = p["n_in"], p["n_out"]
    if n_in % 64 or n_out % 64 or (n_in % 128 and n_out % 128):
        return (
            "it takes multiples of 64 for n_in and n_out, one of them of 128, "
            f"not {n_in} and {n_out}"
        )
    return None


def _machete_takes(call: Call) -> Reason:
    group, n_in = call.problem["group"], call.problem["n_in"]
    if group in (64, 128, n_in):
        return None
    return f"it takes groups of 64, 128, or all {n_in}, not {group}"


MARLIN = Implementation(
    "marlin",
    run=marlin,
    supported=both(_marlin_takes, on_cuda(80)),
    missing=_missing,
    dtypes=OF_16_BITS,
    options=OPTIONS,
    gradients=(),
    traceable=False,
    plan=plan_marlin,
)
MACHETE = Implementation(
    "machete",
    run=machete,
    supported=both(
        _machete_takes, multiples(64, "n_in"), multiples(128, "n_out"), on_cuda(90, below=100)
    ),
    missing=_missing,
    dtypes=OF_16_BITS,
    options=OPTIONS,
    gradients=(),
    traceable=False,
    plan=plan_machete,
)
