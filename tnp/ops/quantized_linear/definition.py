"""Defines a quantized linear layer: its formula, inputs, work, and the cases of its gate."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tnp.dispatch.spec import EVERY_DTYPE_ON, Case, Operator, Problem, Work
from tnp.ops._shared.declared import cases_by_dtype
from tnp.util.checks import require_floats, require_no_gradient, require_one_device

if TYPE_CHECKING:
    from torch import Tensor

    from tnp.dispatch.devices import Target
    from tnp.ops._shared.random_values import Random

GROUPS = (32, 64, 128)  # weights of a row that share a scale; or the whole row
OPTIONS = ("bits", "zeros", "bias")
OF_16_BITS = ("bfloat16", "float16")


def reference(x, weight, scales, zeros=None, bias=None):
    """Computes the weight in x's dtype, and PyTorch's linear layer with it."""
    from torch.nn import functional as F

    from tnp.ops.quantized_linear.quantizer import weight_of

    bias = bias if bias is None else bias.to(x.dtype)
    return F.linear(x, weight_of(weight, scales, zeros, x.dtype), bias)


def describe(x, weight, scales, zeros=None, bias=None) -> dict:
    """Returns the sizes and the bits. Raises ValueError for tensors that do not fit together."""
    given = {"zeros": zeros, "bias": bias}
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    require_no_gradient("quantized_linear", x=x, scales=scales, **given)
    require_one_device(x=x, weight=weight, scales=scales, **given)
    require_floats(x=x)
    if str(weight.dtype) not in ("torch.int8", "torch.int32"):
        raise ValueError(
            f"weight is {weight.dtype}: it must be torch.int8, or torch.int32 with eight codes of "
            "4 bits each"
        )
    bits, each = (8, 1) if str(weight.dtype) == "torch.int8" else (4, 8)
    n_in = x.shape[-1] if x.dim() else 0
    if weight.dim() != 2 or weight.shape[1] * each != n_in or not n_in:
        last = "n_in" if each == 1 else "n_in / 8"
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {weight.dtype} {tuple(weight.shape)}: they must be "
            f"[..., n_in] and [n_out, {last}]"
        )
    n_out = weight.shape[0]
    if scales.dtype != x.dtype:
        raise ValueError(f"scales is {scales.dtype} and x {x.dtype}: they must be equal")
    n_groups = scales.shape[1] if scales.dim() == 2 else 0
    if not n_groups or len(scales) != n_out or n_in % n_groups:
        raise ValueError(
            f"scales has shape {tuple(scales.shape)}: it must be [{n_out}, n_groups], with "
            f"n_groups a divisor of {n_in}"
        )
    group = n_in // n_groups
    if group not in GROUPS and n_groups != 1:
        raise ValueError(
            f"scales has {n_groups} groups of {group} weights: groups must have 32, 64, 128 or all "
            f"{n_in}"
        )
    if zeros is not None and (zeros.shape != scales.shape or str(zeros.dtype) != "torch.uint8"):
        raise ValueError(
            f"zeros is {zeros.dtype} {tuple(zeros.shape)}: it must be torch.uint8 of scales' shape "
            f"{tuple(scales.shape)}"
        )
    if bias is not None and (
        bias.shape != (n_out,) or str(bias.dtype) not in (str(x.dtype), "torch.float32")
    ):
        raise ValueError(
            f"bias is {bias.dtype} {tuple(bias.shape)}: it must be torch.float32 or x's {x.dtype}, "
            f"of shape ({n_out},)"
        )
    rows = prod(x.shape[:-1])
    return {"rows": rows, "n_in": n_in, "n_out": n_out, "group": group, "bits": bits}


def draw(case: Case, random: Random) -> dict[str, Tensor | None]:
    """Draws any codes and zero points, scales with which results are near 1, and a bias.

    Scales lie between a half and three halves of their mean, so that a neighbour's shows. `scale`
    is another mean. If the case names a batch, each sample has a row before x that is not read.
    """
    import torch

    p = case.problem
    rows, n_in, n_out, group = (size for _, size in p.sizes)
    batch, n_groups = int(case["batch"]), n_in // group
    x = random(batch, 1 + rows // batch, n_in)[:, 1:] if batch else random(rows, n_in)
    if p["bits"] == 8:
        weight = random.integers(-128, 127, n_out, n_in, dtype=torch.int8)
    else:
        weight = random.integers(-(2**31), 2**31 - 1, n_out, n_in // 8)
    spread = random(n_out, n_groups, dtype=torch.float32).tanh() / 2 + 1
    mean = case["scale"] or 12**0.5 / (2.0 ** p["bits"] * n_in**0.5)
    most = 2 ** p["bits"] - 1
    zeros = random.integers(0, most, n_out, n_groups, dtype=torch.uint8) if p["zeros"] else None
    bias = random(n_out) if p["bias"] else None
    scales = (spread * mean).to(x.dtype)
    return {"x": x, "weight": weight, "scales": scales, "zeros": zeros, "bias": bias}


def work(case: Case, pass_: str) -> Work:
    """Counts one product in x's dtype; codes, scales, zero points, bias and x are read once."""
    p = case.problem
    rows, n_in, n_out, group = (size for _, size in p.sizes)
    n_scales = n_out * (n_in // group)
    read = p["bits"] * n_in * n_out // 8 + n_scales * (p.itemsize + bool(p["zeros"]))
    read += (rows * n_in + n_out * bool(p["bias"])) * p.itemsize
    return Work({p.dtype: 2.0 * rows * n_in * n_out}, read, rows * n_out * p.itemsize)


# ---------------------------------------------------------------------------------------- the gate

_4, _8 = {"bits": 4}, {"bits": 8}
_ZEROS, _BIAS = {"zeros": True}, {"bias": True}
_INTERPRETED = (
    (1, 64, 24, 32, _4 | _BIAS),
    (17, 256, 40, 64, _4 | _ZEROS),
    (2, 72, 17, 72, _4 | _ZEROS | _BIAS),
    (3, 64, 33, 32, _8 | _ZEROS | _BIAS | {"batch": 3}),
    (2, 77, 19, 77, _8),
    (33, 128, 16, 128, _8 | {"scale": 1e-4}),
)
_ROWS = (1, 2, 8, 15, 16, 17, 40, 64, 65, 777, 1030)


def _on_gpu():
    """Yields sizes: each number of rows; each group with both bits; ragged widths; far scales."""
    for rows in _ROWS:
        for bits in (_4, _8):
            yield rows, 1024, 777, 128, bits
        yield rows, 2048, 512, 64, _4 | _ZEROS | _BIAS
        yield rows, 512, 1365, 32, _8 | _ZEROS
    for rows in (2, 40):
        for bits in (_4, _8):
            for group in GROUPS:
                yield rows, group, 100, group, bits | _BIAS
                yield rows, 3 * group, 264, group, bits | _ZEROS
            yield rows, 2056, 513, 2056, bits
            yield rows, 72, 9, 72, bits | _ZEROS | _BIAS
            yield rows, 4096, 4096, 128, bits | _ZEROS
            yield rows, 512, 264, 64, bits | _BIAS | {"scale": 1e-4}
        yield rows, 777, 1, 777, _8 | _BIAS
    yield 14, 1024, 512, 32, _4 | {"batch": 7}
    yield 66, 640, 512, 128, _8 | _BIAS | {"batch": 3}


# float16 ends at 65,504, and results of such scales do not fit.
_FAR = [(rows, 1024, 512, 64, bits | {"scale": 1e3}) for rows in (8, 40) for bits in (_4, _8)]


def cases(operator: Operator, target: Target) -> list[Case]:
    """Covers few and many rows, both bits, all groups, zero points, bias, and ragged widths."""
    if target.kind != "cuda":
        small = (16, 64, 24, 32, _8 | {"scale": 1e3})
        both = {"bfloat16": (*_INTERPRETED, small), "float16": _INTERPRETED[::-1]}
    else:
        both = {"bfloat16": [*_on_gpu(), *_FAR], "float16": list(_on_gpu())}
    return cases_by_dtype(operator, both)


def compiled(operator: Operator, target: Target):
    """Yields problems to compile: few and many rows, both bits, in groups and rows, ragged."""
    for dtype in OF_16_BITS if target.capability in EVERY_DTYPE_ON else ("bfloat16",):
        for rows in (1, 40, 512):
            for options in (_4, _8, _4 | _ZEROS | _BIAS, _8 | _ZEROS):
                yield _problem(operator, dtype, rows, 128, options)
        for rows in (20, 40):
            yield _problem(operator, dtype, rows, 32, _4)
        for options in (_4 | _ZEROS, _8):
            yield _problem(operator, dtype, 2048, 128, options)
        yield _problem(operator, dtype, 40, 4096, _8)
        ragged = {"n_in": 2056, "n_out": 513, "group": 2056}
        yield operator.problem(dtype, rows=40, **ragged, **_4, **_ZEROS)


def _problem(operator: Operator, dtype: str, rows: int, group: int, options: dict) -> Problem:
    return operator.problem(dtype, rows=rows, n_in=4096, n_out=4096, group=group, **options)


def _by_values(change):
    """Returns a broken reference whose codes less zero points, [n_out, n_in], are changed."""

    def broken(x, weight, scales, zeros=None, bias=None):
        from torch.nn import functional as F

        from tnp.ops.quantized_linear.packing import centred

        values = change(centred(weight, zeros).flatten(1).to(x.dtype), weight, zeros)
        values = values.unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(-1)
        return F.linear(x, values.flatten(1), bias if bias is None else bias.to(x.dtype))

    return broken


def _without_zero_points(values, weight, zeros):
    from tnp.ops.quantized_linear.packing import unpack

    return unpack(weight).to(values.dtype)


def _last_group_left_out(x, weight, scales, zeros=None, bias=None):
    scales = scales.clone()
    scales[:, -1] = 0.0
    return reference(x, weight, scales, zeros, bias)


def _nibbles_swapped(x, weight, scales, zeros=None, bias=None):
    from torch import int32

    if weight.dtype == int32:
        weight = (weight & 0x0F0F0F0F) << 4 | (weight >> 4) & 0x0F0F0F0F
    return reference(x, weight, scales, zeros, bias)


CONTROLS = {
    "zero point left out": _by_values(_without_zero_points),
    "scales of the next group": lambda x, weight, scales, *rest: reference(
        x, weight, scales.roll(-1, 1), *rest
    ),
    "scales shifted by a row": lambda x, weight, scales, *rest: reference(
        x, weight, scales.roll(1, 0), *rest
    ),
    "nibbles swapped": _nibbles_swapped,
    "last group left out": _last_group_left_out,
    "sign lost": _by_values(lambda values, weight, zeros: values.abs()),
}
