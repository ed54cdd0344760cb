"""Computes a feed-forward layer without biases, for each row by itself.

    y = silu(x upᵀ) downᵀ

`torch` is the formula in PyTorch. `fused` computes SiLU in the matmuls' epilogues (`composed`).
`single` is one kernel for few rows (`single`). `e4m3` multiplies rows in 8 bits, forward and
backward (`composed_8bit`). Weights are float32 parameters, cast to x's dtype
(`tnp.ops._shared.casting`). Our implementations accumulate their gradients in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from tnp.dispatch.spec import (
    EVERY_DTYPE_ON,
    Budget,
    Case,
    Implementation,
    Operation,
    Operator,
    Problem,
    Work,
    lacks_shared,
    triton_from,
)
from tnp.ops._shared.declared import by_pytorch, by_triton, in_8_bits, width_in_8_bits
from tnp.ops.mlp import eight_bit
from tnp.util.checks import require_floats, require_one_device

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["mlp"]

# Widths that `single` takes: a tile is at least 16 wide, and 64 rows of 512 float32 sums fill the
# registers.
MIN_D, MAX_D = 16, 512
# For more rows `fused` saves nothing and computes z again in chunks, to save memory. In 16 bits h
# and z of 205,000 rows would take 1.1 GiB at F = 1408.
SAVED_ROWS = 65_536


def reference(x, up, down):
    from torch.nn.functional import linear, silu

    return linear(silu(linear(x, up.to(x.dtype))), down.to(x.dtype))


def describe(x, up, down) -> dict:
    if up.dim() != 2 or down.shape != up.shape[::-1]:
        raise ValueError(
            f"up is {tuple(up.shape)} and down {tuple(down.shape)}: they must be [F, D] and [D, F]"
        )
    if x.dim() == 0 or x.shape[-1] != up.shape[1]:
        raise ValueError(f"x is {tuple(x.shape)}: it must be [..., D] with D = {up.shape[1]} of up")
    require_floats(x=x, up=up, down=down)
    require_one_device(x=x, up=up, down=down)
    return {"rows": prod(x.shape[:-1]), "d_model": up.shape[1], "d_ff": up.shape[0]}


def draw(case, random) -> dict:
    """Draws normal x, and weights scaled by their fan-in.

    Hidden units after the first `d_ff_real` are padding.

    With `wide`, x is columns `start` to `start + d_model` of a tensor of that width. With
    `magnitudes`, rows of x and of dy have magnitudes from 1e-3 to 1e3, and two of each are zero.
    """
    problem = case.problem
    d_model, d_ff = problem["d_model"], problem["d_ff"]
    start = case["start"] or 0
    x = random(problem["rows"], case["wide"] or d_model)[:, start : start + d_model]
    dy = {}
    if case["magnitudes"]:
        of_x, of_dy = _magnitudes(x, 7), _magnitudes(x, 11)
        x, dy = x * of_x, {"dy": random(*x.shape) * of_dy}
    up, down = random.weight(d_ff, d_model), random.weight(d_model, d_ff)
    if case["d_ff_real"]:
        up[case["d_ff_real"] :] = 0.0
        down[:, case["d_ff_real"] :] = 0.0
    return {"x": x, "up": up, "down": down} | dy


def _magnitudes(x, step):
    """Returns [T, 1]: powers of ten and two zeros, in an order that `step` decides."""
    from torch import arange

    at = arange(len(x), device=x.device) * step
    magnitude = 10.0 ** (at % 61 / 10.0 - 3.0)
    magnitude[[step, -1]] = 0.0
    return magnitude.to(x.dtype)[:, None]


def work(case, pass_) -> Work:
    """Counts two products forward and four backward of the real hidden units, and float32 weights
    and gradients.

    x is read and y written; backward x and dy are read and dx is written.
    """
    problem = case.problem
    n, d_model, d_ff = (problem[name] for name in ("rows", "d_model", "d_ff"))
    products = {"forward": 1, "backward": 2}[pass_]
    flops = products * 4.0 * n * d_model * (case["d_ff_real"] or d_ff)
    rows, weights = n * d_model * problem.itemsize, 2 * d_model * d_ff * 4
    if pass_ == "forward":
        return Work({problem.dtype: flops}, rows + weights, rows)
    return Work({problem.dtype: flops}, 2 * rows + weights, rows + weights)


def cases(target) -> list[Case]:
    """Covers one and many rows, padding, a ragged width, one tile, strided and misaligned rows."""
    case = OPERATOR.case
    if target.kind != "cuda":
        sizes, padded = (70, 32, 48), {"d_ff_real": 42}
        return [
            case("bfloat16", *sizes, **padded),
            case("float16", *sizes, **padded),
            case("float32", 1, 32, 42),
            case("float32", 130, 64, 200, d_ff_real=170),
            case("bfloat16", *sizes, wide=40, **padded),
            case("bfloat16", *sizes, wide=40, start=1, **padded),
            case("bfloat16", *sizes, magnitudes=True),
        ]
    model, padded = (512, 1408), {"d_ff_real": 1365}
    rows = (1, 63, 65, 564, 777, 11_000, 44_000, 70_000)
    return [
        # With more than 65,536 rows nothing is saved: z is computed again, in chunks.
        *(case("bfloat16", n, *model, **padded) for n in rows),
        case("bfloat16", 777, 512, 128, d_ff_real=100),  # one tile wide
        case("bfloat16", 777, *model, wide=576, **padded),
        case("bfloat16", 777, *model, wide=576, start=1, **padded),  # no row starts at 16 bytes
        case("bfloat16", 777, *model, magnitudes=True),
        case("float16", 777, *model, **padded),
        case("float32", 564, *model, **padded),
        case("bfloat16", 300, 512, 1365),  # the hidden width is padded
        case("bfloat16", 300, 64, 96),
    ]


def compiled(target) -> Iterator[Problem]:
    """Yields problems to compile: rows whose hidden layer is saved, and more rows."""
    for dtype in ("bfloat16", "float32") if target.capability in EVERY_DTYPE_ON else ("bfloat16",):
        for rows in (44_000, 70_000):
            yield OPERATOR.problem(dtype, rows=rows, d_model=512, d_ff=1408)


def within(model, run):
    """Returns the problem of the layer of every block: every row of context and targets."""
    rows = run["batch"] * (run["n_context"] + run["n_target"])
    d_ff = model.get("d_ff_storage") or model["d_ff"]
    return OPERATOR.problem(run["dtype"], rows=rows, d_model=model["d_model"], d_ff=d_ff)


def _single(call):
    """Returns why `single` cannot serve a call: Triton is missing, or D does not fit. Else None."""
    d = call.problem["d_model"]
    if (reason := triton_from(80)(call)) is not None:
        return reason
    if not MIN_D <= d <= MAX_D or d & (d - 1):
        return f"D is {d}: it takes a power of two from {MIN_D} to {MAX_D}"
    # Tiles of both weights, two stages of each: 132 KB at D = 512 in 16 bits.
    return lacks_shared(call, 264 * d) if call.problem.itemsize == 2 else None


def _in_8_bits(call):
    """Returns why `e4m3` cannot serve a call, or None. It needs tensor cores for e4m3."""
    if (reason := triton_from(89)(call)) is not None:
        return reason
    return width_in_8_bits(call.problem["d_model"])


def _no_activation(x, up, down):
    return x @ up.to(x.dtype).T @ down.to(x.dtype).T


def _half_the_rows(x, up, down):
    from torch import cat

    n = len(x) // 2
    return cat([reference(x[:n], up, down), x[n:] * 0])


def _up_shifted(x, up, down):
    return reference(x, up.roll(up.shape[0] // 2, 0), down)


def _without_scales(x, up, down):
    """Computes the layer with x in 8 bits without scales: large numbers are cut."""
    from torch import float8_e4m3fn

    clamped = x.clamp(-448.0, 448.0)
    narrow = clamped.detach().float().to(float8_e4m3fn).to(x.dtype)
    return reference(clamped + (narrow - clamped.detach()), up, down)


_FUSED = by_triton(
    "fused",
    "mlp",
    "tnp.ops.mlp.composed",
    forward=("FORWARD_SLOPE", "FORWARD_Z", "FORWARD_HOPPER_AGAIN", "FORWARD_AGAIN"),
    backward=("BACKWARD_SLOPE", "BACKWARD_Z", "BACKWARD_HOPPER_AGAIN", "BACKWARD_AGAIN"),
)
OPERATOR = Operator(
    "mlp",
    phase=6,
    inputs=("x", "up", "down"),
    outputs=("y",),
    sizes=("rows", "d_model", "d_ff"),
    differentiated=("x", "up", "down"),
    implementations=(
        *by_pytorch(reference),
        Implementation(
            "single",
            forward=Operation("mlp.single", ("tnp.ops.mlp.single:FORWARD",)),
            backward=_FUSED.backward,
            supported=_single,
        ),
        _FUSED,
        by_triton(
            "e4m3",
            "mlp_8bit",
            "tnp.ops.mlp.composed_8bit",
            forward=("FORWARD_SLOPE", "FORWARD_Z", "FORWARD_HOPPER_AGAIN", "FORWARD_AGAIN"),
            backward=("BACKWARD_SLOPE", "BACKWARD_Z", "BACKWARD_HOPPER_AGAIN", "BACKWARD_AGAIN"),
            supported=_in_8_bits,
            dtypes=("bfloat16",),
            precision="e4m3",
            budget=Budget(emulate=eight_bit.held, rounded=eight_bit.rounded),
            work=lambda case, pass_: in_8_bits(work(case, pass_)),
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    within=within,
    compiled=compiled,
    controls={
        "no activation": _no_activation,
        "half of the rows dropped": _half_the_rows,
        "rows of up shifted": _up_shifted,
        "rows in 8 bits without scales": _without_scales,
    },
)


def mlp(x: Tensor, up: Tensor, down: Tensor, *, implementation: str = "torch") -> Tensor:
    """Returns silu(x upᵀ) downᵀ.

    Args:
        x: [..., D], bfloat16, float16 or float32 (`torch`: float64 too).
        up, down: [F, D] and [D, F], any float dtype, usually float32 parameters. `single` takes D
            that is a power of two from 16 to 512. `e4m3` takes bfloat16 and D that is a
            multiple of 16.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [..., D] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        RuntimeError: the implementation cannot run on this device and these sizes and dtypes.
    """
    import tnp.dispatch.call as dispatch

    return dispatch.call(OPERATOR, implementation, (x, up, down))
