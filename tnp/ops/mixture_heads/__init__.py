"""Computes mixture heads: one small MLP for each of K components, all with the same input.

    out_k = silu(x up_kᵀ) down_kᵀ        out [..., K, O], O = 1 + 2·d_y

`torch` multiplies by all heads' up at once, `loop` head by head, `bmm` as a batch, and `grouped_mm`
by PyTorch's grouped matmul. Their results are in x's dtype. `fused` is ours (`hopper`,
`triton_heads`): the hidden rows, K · F wide, stay on the chip, and the result is float32. On
Hopper, up to `SAVED_ROWS` rows, it also writes z = x up_kᵀ for the backward pass (`saved_z`).
`e4m3` multiplies by up in 8 bits, forward and backward (`composed_8bit`). Weights are float32
parameters, cast to x's dtype (`tnp.ops._shared.casting`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from tnp.dispatch.spec import (
    ALL_FLOATS,
    EVERY_DTYPE_ON,
    Budget,
    Case,
    Implementation,
    Operation,
    Operator,
    Problem,
    Work,
    on_cuda,
    triton_from,
)
from tnp.ops._shared.declared import by_pytorch, by_triton, width_in_8_bits
from tnp.ops.mixture_heads import eight_bit
from tnp.util.checks import require_floats, require_one_device

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["mixture_heads"]

# grouped_mm takes rows of a multiple of 16 bytes, which hold so many elements.
GROUPED_MULTIPLE = 8
MAX_OUTPUTS = 16  # the most outputs of a head, for `fused`
# For more rows `fused` saves nothing and computes z again, to save memory. In 16 bits z of 40,000
# rows takes 1.1 GB at 10 heads and F = 1408.
SAVED_ROWS = 40_000
N_OUTPUTS = 3  # a model's head: logit of the weight, mean and log sigma of one dimension


def reference(x, up, down):
    """Computes the formula in x's dtype, with one matmul for all heads' hidden rows."""
    from torch import einsum
    from torch.nn.functional import linear, silu

    hidden = silu(linear(x, up.flatten(0, 1).to(x.dtype))).unflatten(-1, up.shape[:2])
    return einsum("...kf,kof->...ko", hidden, down.to(x.dtype))


def _loop(x, up, down):
    from torch import stack
    from torch.nn.functional import linear, silu

    up, down = up.to(x.dtype), down.to(x.dtype)
    heads = [linear(silu(linear(x, up_k)), down_k) for up_k, down_k in zip(up, down, strict=True)]
    return stack(heads, dim=-2)


def _bmm(x, up, down):
    from torch import bmm
    from torch.nn.functional import silu

    rows = x.reshape(-1, x.shape[-1]).expand(len(up), -1, -1)
    hidden = silu(bmm(rows, up.to(x.dtype).mT))
    out = bmm(hidden, down.to(x.dtype).mT)
    return out.transpose(0, 1).reshape(*x.shape[:-1], *down.shape[:2])


def _grouped_mm(x, up, down):
    """Does the same as `_bmm`, with O zero-padded to a multiple that grouped_mm takes."""
    from torch.nn.functional import grouped_mm, pad, silu

    n_out = down.shape[1]
    rows = x.reshape(-1, x.shape[-1]).expand(len(up), -1, -1)
    hidden = silu(grouped_mm(rows, up.to(x.dtype).mT))
    down = pad(down.to(x.dtype), (0, 0, 0, -n_out % GROUPED_MULTIPLE))
    out = grouped_mm(hidden, down.mT)[..., :n_out]
    return out.transpose(0, 1).reshape(*x.shape[:-1], len(up), n_out)


def describe(x, up, down) -> dict:
    if up.dim() != 3 or down.dim() != 3 or down.shape[::2] != up.shape[:2]:
        raise ValueError(
            f"up is {tuple(up.shape)} and down {tuple(down.shape)}: "
            "they must be [K, F, D] and [K, O, F]"
        )
    n_heads, d_ff, d_model = up.shape
    if x.dim() == 0 or x.shape[-1] != d_model:
        raise ValueError(f"x is {tuple(x.shape)}: it must be [..., D] with D = {d_model} of up")
    require_floats(x=x, up=up, down=down)
    require_one_device(x=x, up=up, down=down)
    return {
        "rows": prod(x.shape[:-1]), "d_model": d_model, "d_ff": d_ff, "n_components": n_heads,
        "n_outputs": down.shape[1],
    }  # fmt: skip


def draw(case, random) -> dict:
    """Draws normal x, and weights scaled by their fan-in.

    Hidden units after the first `d_ff_real` are padding.

    With `wide`, x is columns `start` to `start + d_model` of a tensor of that width.
    """
    problem = case.problem
    d_model, d_ff, n_heads = (problem[name] for name in ("d_model", "d_ff", "n_components"))
    start = case["start"] or 0
    x = random(problem["rows"], case["wide"] or d_model)[:, start : start + d_model]
    up = random.weight(n_heads, d_ff, d_model)
    down = random.weight(n_heads, problem["n_outputs"], d_ff)
    if case["d_ff_real"]:
        up[:, case["d_ff_real"] :] = 0.0
        down[..., case["d_ff_real"] :] = 0.0
    return {"x": x, "up": up, "down": down}


def work(case, pass_) -> Work:
    """Counts the work of `mlp`, and n_components · n_outputs numbers written for each row."""
    problem = case.problem
    n, d_model, d_ff, n_heads, n_out = (size for _, size in problem.sizes)
    products = {"forward": 1, "backward": 2}[pass_]
    flops = products * 2.0 * n * n_heads * (case["d_ff_real"] or d_ff) * (d_model + n_out)
    x, out = n * d_model * problem.itemsize, n * n_heads * n_out * problem.itemsize
    weights = n_heads * d_ff * (d_model + n_out) * 4
    if pass_ == "forward":
        return Work({problem.dtype: flops}, x + weights, out)
    return Work({problem.dtype: flops}, x + out + weights, x + weights)


def cases(target) -> list[Case]:
    """Covers one and many rows, padding, ragged widths, other heads and outputs, strided x."""
    case = OPERATOR.case
    if target.kind != "cuda":
        sizes, padded = (70, 32, 48, 3, N_OUTPUTS), {"d_ff_real": 42}
        return [
            case("bfloat16", *sizes, **padded),
            case("float16", *sizes, **padded),
            case("float32", 1, 32, 42, 2, N_OUTPUTS),
            case("float32", 130, 42, 200, 2, 16, d_ff_real=170),
            case("bfloat16", *sizes, wide=40, **padded),
            case("bfloat16", *sizes, wide=40, start=1, **padded),
        ]
    model, padded = (512, 1408, 10, N_OUTPUTS), {"d_ff_real": 1365}
    return [
        # With more than 40,000 rows nothing is saved on Hopper.
        *(
            case("bfloat16", n, *model, **padded)
            for n in (1, 16, 17, 63, 65, 564, 777, 11_000, 44_000)
        ),
        *(case("bfloat16", n, 512, 1408, 3, N_OUTPUTS, **padded) for n in (777, 11_000)),
        case("bfloat16", 777, 512, 128, 10, N_OUTPUTS, d_ff_real=100),  # one tile wide
        case("bfloat16", 777, *model, wide=576, **padded),
        case("bfloat16", 777, *model, wide=576, start=1, **padded),  # no row starts at 16 bytes
        case("float16", 777, *model, **padded),
        case("float32", 564, *model, **padded),
        case("bfloat16", 300, 512, 1365, 10, N_OUTPUTS),  # the hidden width is padded
        case("bfloat16", 4097, 64, 96, 3, 16),
    ]


def compiled(target) -> Iterator[Problem]:
    """Yields problems to compile: with so many rows that z is saved, and with few rows."""
    sizes = {"d_model": 512, "d_ff": 1408, "n_components": 10, "n_outputs": N_OUTPUTS}
    for dtype in ("bfloat16", "float32") if target.capability in EVERY_DTYPE_ON else ("bfloat16",):
        for rows in (2, 32_000):
            yield OPERATOR.problem(dtype, rows=rows, **sizes)


def within(model, run):
    return OPERATOR.problem(
        run["dtype"], rows=run["batch"] * run["n_target"], d_model=model["d_model"],
        d_ff=model.get("d_ff_storage") or model["d_ff"], n_components=model["n_components"],
        n_outputs=1 + 2 * model.get("d_y", 1),
    )  # fmt: skip


def _fused(call):
    if (reason := triton_from(80)(call)) is not None:
        return reason
    n_out = call.problem["n_outputs"]
    if n_out > MAX_OUTPUTS:
        return (
            f"O, which is 1 + 2·d_y, is {n_out}, and it takes at most {MAX_OUTPUTS} outputs a head"
        )
    return None


def _grouped(call):
    d_ff, d_model = call.problem["d_ff"], call.problem["d_model"]
    if d_ff % GROUPED_MULTIPLE or d_model % GROUPED_MULTIPLE:
        return (
            f"F is {d_ff} and D {d_model}: it takes multiples of {GROUPED_MULTIPLE}, whose rows "
            "are whole multiples of 16 bytes"
        )
    if not call.aligned:
        return "a row of x starts at no multiple of 16 bytes"
    return on_cuda(90)(call)


def _in_8_bits(call):
    """Returns why `e4m3` cannot serve a call, or None. It needs tensor cores for e4m3."""
    if (reason := triton_from(89)(call)) is not None:
        return reason
    n_out, d_model = call.problem["n_outputs"], call.problem["d_model"]
    if n_out != N_OUTPUTS:
        return f"it takes d_y = 1: {N_OUTPUTS} outputs a head, not {n_out}"
    return width_in_8_bits(d_model)


def _work_in_8_bits(case, pass_):
    """Counts the products with up in e4m3, and those with down in float32."""
    least = work(case, pass_)
    (flops,) = least.flops.values()
    d_model, n_out = case.problem["d_model"], case.problem["n_outputs"]
    narrow = flops * d_model / (d_model + n_out)
    return Work({"e4m3": narrow, "float32": flops - narrow}, least.read, least.written)


def _no_activation(x, up, down):
    from torch import einsum

    return einsum("...d,kfd,kof->...ko", x, up.to(x.dtype), down.to(x.dtype))


_TRITON, _HOPPER = "tnp.ops.mixture_heads.triton_heads", "tnp.ops.mixture_heads.hopper"


def _operation(pass_, *first):
    names = (f"{_HOPPER}:{pass_}_Z", f"{_HOPPER}:{pass_}_AGAIN", f"{_TRITON}:{pass_}")
    return Operation(f"mixture_heads.{pass_.lower()}", (*first, *names))


OPERATOR = Operator(
    "mixture_heads",
    phase=7,
    inputs=("x", "up", "down"),
    outputs=("out",),
    sizes=("rows", "d_model", "d_ff", "n_components", "n_outputs"),
    differentiated=("x", "up", "down"),
    implementations=(
        *by_pytorch(reference),
        # Only benchmarks and models that name it use it.
        Implementation("loop", run=_loop, provider="torch", dtypes=ALL_FLOATS, selectable=False),
        Implementation("bmm", run=_bmm, provider="torch", dtypes=ALL_FLOATS),
        Implementation(
            "grouped_mm", run=_grouped_mm, provider="torch", dtypes=("bfloat16",),
            supported=_grouped, selectable=False,
        ),
        Implementation(
            "fused", forward=_operation("FORWARD", f"{_TRITON}:FEW_ROWS"),
            backward=_operation("BACKWARD"), supported=_fused,
        ),
        by_triton(
            "e4m3",
            "mixture_heads_8bit",
            "tnp.ops.mixture_heads.composed_8bit",
            forward=("FORWARD_ORDERED", "FORWARD_Z", "FORWARD_HOPPER_AGAIN", "FORWARD_AGAIN"),
            backward=("BACKWARD_ORDERED", "BACKWARD_Z", "BACKWARD_HOPPER_AGAIN", "BACKWARD_AGAIN"),
            supported=_in_8_bits,
            dtypes=("bfloat16",),
            precision="e4m3",
            budget=Budget(emulate=eight_bit.held, rounded=eight_bit.rounded),
            work=_work_in_8_bits,
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
        "heads exchanged": lambda x, up, down: reference(x, up, down.flip(0)),
        "outputs shifted": lambda x, up, down: reference(x, up, down.roll(1, 1)),
    },
)  # fmt: skip


def mixture_heads(x: Tensor, up: Tensor, down: Tensor, *, implementation: str = "torch") -> Tensor:
    """Returns silu(x up_kᵀ) down_kᵀ of every head k.

    Args:
        x: [..., D]. `fused` takes bfloat16, float16 or float32, `grouped_mm` bfloat16, others
            float64 too. `e4m3` takes bfloat16.
        up, down: [K, F, D] and [K, O, F], any float dtype, usually float32 parameters. `fused`
            takes O up to 16, `grouped_mm` D and F that are multiples of 8, `e4m3` O = 3 and D that
            is a multiple of 16.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [..., K, O], float32 from `fused` and `e4m3`, else in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        RuntimeError: the implementation cannot run on this device and these sizes and dtypes.
    """
    import tnp.dispatch.call as dispatch

    return dispatch.call(OPERATOR, implementation, (x, up, down))
