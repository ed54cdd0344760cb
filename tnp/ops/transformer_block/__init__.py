"""Runs a pre-norm transformer block of a neural process as one operator.

    h₁ = h + update                x₁ = rms_norm(h₁)
    q, k, v = project_qkv(x₁)      u = attention(q, k, v) w_outputᵀ
    h₂ = h₁[:, first:] + u         x₂ = rms_norm(h₂)
    y = mlp(x₂)

It returns h₂ and y. The next block takes them as h and update. Rows from `first` on are queries,
the first n_k rows are keys. `torch` consists of PyTorch's forms of these operators. `fused` runs
our kernels behind one autograd function (`composed`), so that the host makes one call in place of
six.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from operator import index
from typing import TYPE_CHECKING

from tnp.dispatch.registry import LAYERS, catalog, is_automatic
from tnp.dispatch.spec import (
    EVERY_DTYPE_ON,
    Budget,
    Call,
    Case,
    Implementation,
    Operation,
    Operator,
    Problem,
    Reason,
    Work,
)
from tnp.ops import rms_norm as norms
from tnp.ops._shared.declared import by_pytorch, compiled_sdpa, numbers_out_of_range
from tnp.ops.attention import OPERATOR as ATTENTION
from tnp.ops.attention.torch_forms import visible
from tnp.ops.mlp import OPERATOR as MLP
from tnp.ops.mlp import eight_bit
from tnp.ops.projection import LINEAR, PROJECT_QKV
from tnp.ops.rms_norm import ADD_RMS_NORM, RMS_NORM
from tnp.util.checks import positive_number, require_between, require_equal, require_lengths

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["transformer_block"]

WEIGHTS = ("norm_attention", "qkv", "output", "norm_mlp", "up", "down")
TAKEN = ("update", "n_keys", "centred")  # options that every implementation takes


def reference(
    h, update, norm_attention, qkv, output, norm_mlp, up, down, n_keys, eps,
    n_heads, n_q=None, n_k=None, centred=False, attend=ATTENTION.reference, **layers,
):  # fmt: skip
    """Runs the layers' plain forms in turn, in any float dtype. It ignores `layers`.

    `attend` takes the arguments of attention's reference.
    """
    total = h if update is None else h + update
    x = norms.reference(total, norm_attention, eps)
    of_means = n_keys if centred else None
    q, k, v = PROJECT_QKV.reference(x, qkv, of_means, n_heads, n_q=n_q, n_k=n_k, centred=centred)
    o = attend(q, k, v, n_keys, None, None, q.shape[-1] ** -0.5)
    u = LINEAR.reference(o.transpose(1, 2).flatten(-2), output)
    total, x = norms.add_reference(total[:, -q.shape[2] :], u, norm_mlp, eps)
    return total, MLP.reference(x, up, down)


def sdpa(*inputs, **options):
    """Runs the same layers with PyTorch's SDPA."""
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q, k, v, n_keys, cu_seqlens_q, cu_seqlens_k, scale):
        seen = visible(q, k, n_keys, cu_seqlens_q, cu_seqlens_k)
        return scaled_dot_product_attention(q, k, v, seen, scale=scale)

    return reference(*inputs, **options, attend=attend)


def describe(
    h, update, norm_attention, qkv, output, norm_mlp, up, down, n_keys,
    n_heads, n_q=None, n_k=None, centred=False, **layers,
) -> dict:  # fmt: skip
    if h.dim() != 3:
        raise ValueError(f"h is {tuple(h.shape)}: it must be [B, L, d_model]")
    if update is not None:
        require_equal(h=h, update=update)
    for name, weight in (("norm_attention", norm_attention), ("norm_mlp", norm_mlp)):
        norms.describe(h, weight, name)
    sizes = PROJECT_QKV.describe(h, qkv, None, n_heads, n_q=n_q, n_k=n_k, centred=centred)
    d_model = sizes["d_model"]
    if output.shape != (d_model, d_model):
        raise ValueError(f"output is {tuple(output.shape)}: it must be {(d_model, d_model)}")
    LINEAR.describe(h, output)
    if n_keys is not None:
        require_lengths(h, n_keys=n_keys)
    return sizes | {"d_ff": MLP.describe(h, up, down)["d_ff"]}


def draw(case, random) -> dict:
    """Draws h, an update like it if the case has one, weights, and n_keys if it has them."""
    import torch

    p = case.problem
    shape = p["batch"], p["rows"], p["d_model"]
    d_model, d_ff = p["d_model"], p["d_ff"]
    drawn = {"h": random(*shape), "update": random(*shape) if p["update"] else None}
    for name in ("norm_attention", "norm_mlp"):
        drawn[name] = 1 + 0.3 * random(d_model, dtype=torch.float32)
    drawn |= {"qkv": random.weight(3 * d_model, d_model), "output": random.weight(d_model, d_model)}
    drawn |= {"up": random.weight(d_ff, d_model), "down": random.weight(d_model, d_ff)}
    if p["n_keys"]:
        drawn["n_keys"] = random.integers(1, p["n_k"], p["batch"])
    return drawn


def layers(problem: Problem) -> Iterator[tuple[Operator, str, Problem]]:
    """Yields the operators of the block in turn, each with its implementation and problem."""

    def layer(operator: Operator, family: str, **sizes) -> tuple[Operator, str, Problem]:
        return operator, str(problem[family] or "own"), operator.problem(problem.dtype, **sizes)

    batch, rows, d_model, d_ff, n_heads, n_q, n_k = (size for _, size in problem.sizes)
    n_keys, centred = bool(problem["n_keys"]), bool(problem["centred"])
    first = ADD_RMS_NORM if problem["update"] else RMS_NORM
    yield layer(first, "rms_norm", rows=batch * rows, width=d_model)
    yield layer(
        PROJECT_QKV, "projection", batch=batch, rows=rows, d_model=d_model, n_heads=n_heads,
        n_q=n_q, n_k=n_k, base2=True, centred=centred, n_keys=n_keys and centred,
    )  # fmt: skip
    yield layer(
        ATTENTION, "attention", batch=batch, n_heads=n_heads, n_q=n_q, n_k=n_k,
        head_dim=d_model // n_heads, base2=True, n_keys=n_keys,
    )  # fmt: skip
    yield layer(LINEAR, "projection", rows=batch * n_q, n_in=d_model, n_out=d_model)
    yield layer(ADD_RMS_NORM, "rms_norm", rows=batch * n_q, width=d_model)
    yield layer(MLP, "mlp", rows=batch * n_q, d_model=d_model, d_ff=d_ff)


def work(case, pass_) -> Work:
    """Returns the layers' operations, and the bytes of streams, float32 weights and gradients."""
    p = case.problem
    parts = [operator.work(Case(problem), pass_) for operator, _, problem in layers(p)]
    flops = sum(sum(part.flops.values()) for part in parts)
    arriving = p["batch"] * p["rows"] * p["d_model"] * p.itemsize * (1 + bool(p["update"]))
    leaving = 2 * p["batch"] * p["n_q"] * p["d_model"] * p.itemsize
    weights = (4 * p["d_model"] ** 2 + 2 * p["d_model"] * p["d_ff"] + 2 * p["d_model"]) * 4
    if pass_ == "forward":
        return Work({p.dtype: flops}, arriving + weights, leaving)
    return Work({p.dtype: flops}, arriving + leaving + weights, arriving + weights)


def supported(call: Call) -> Reason:
    """Returns None if every layer has a kernel of ours for this call, else the reason."""
    for operator, name, problem in layers(call.problem):
        what = Call(problem, call.target, operator.differentiated if call.wanted else ())
        if is_automatic(name):
            from tnp.dispatch.selection import choose_implementation

            try:
                found = choose_implementation(operator, name, what)[1]
            except RuntimeError as error:  # nothing serves it, with the reason
                return str(error)
        else:
            found = catalog().load(operator.name, name)
        if found.forward is None:
            return f"{operator.name} runs {found.name!r}, which has no kernel of ours"
        if (reason := found.refuses(what)) is not None:
            return f"{operator.name}: {reason}"
    return None


def cases(target) -> list[Case]:
    """Covers first and later blocks, n_keys, a last block with only targets, centred keys."""

    def case(dtype: str, *sizes: int, **options) -> Case:
        return OPERATOR.case(dtype, *sizes, **options)

    if target.kind != "cuda":
        return [
            case("bfloat16", 1, 11, 32, 48, 2, 11, 6),
            case("float32", 3, 9, 32, 40, 2, 4, 6, update=True, n_keys=True),
            case("float16", 1, 19, 32, 48, 2, 19, 17, update=True, centred=True, n_keys=True),
            case("bfloat16", 2, 70, 32, 48, 2, 60, 6, update=True, mlp="e4m3"),
        ]
    model = 512, 1408, 8
    return [
        case("bfloat16", 8, 564, *model, 564, 64),
        case("bfloat16", 8, 564, *model, 564, 64, update=True),
        case("bfloat16", 8, 564, *model, 500, 64, update=True, n_keys=True),
        case("bfloat16", 2, 1100, *model, 1100, 1000, update=True),
        # The last items of attention's backward pass are split into pieces.
        case("bfloat16", 1, 2200, *model, 2200, 2050, update=True),
        case("bfloat16", 2, 1100, *model, 100, 1000, update=True, centred=True, n_keys=True),
        case("bfloat16", 2, 1100, *model, 1100, 1000, update=True, attention="separate"),
        case("float16", 3, 333, *model, 300, 300, update=True),
        case("float32", 2, 300, *model, 300, 100, update=True),
        case("bfloat16", 8, 564, *model, 564, 64, mlp="e4m3"),
        case("bfloat16", 8, 564, *model, 500, 64, update=True, mlp="e4m3"),
        # Samples are whole blocks of 128 rows: where one is NaN, no scale of another changes.
        case("bfloat16", 8, 576, *model, 512, 64, update=True, n_keys=True, mlp="e4m3"),
    ]


def rounded(case, inputs, upstream) -> dict[str, Tensor]:
    """Returns results in float64 with the roundings of an MLP in 8 bits, or {} for 16 bits.

    It is {} too if no gradient of y arrives, because nothing then depends on these roundings.
    """
    from torch.autograd import grad

    if case.problem["mlp"] != "e4m3":
        return {}
    leaves = {
        name: x.detach().double().requires_grad_() if name in OPERATOR.differentiated else x
        for name, x in inputs.items()
        if x is not None
    }
    options, dtype = dict(OPERATOR.call_options(case.problem)), inputs["h"].dtype
    total, y = reference(*(leaves.get(name) for name in inputs), *OPERATOR.numbers, **options)
    dsum, dy = upstream("sum", total.detach()), upstream("y", y.detach())
    if dy is None:
        return {}
    x = norms.reference(total, leaves["norm_mlp"], norms.EPS)
    of_mlp = {name: inputs[name] for name in ("up", "down")}
    of_mlp["x"] = x.detach().to(dtype).flatten(0, -2)
    found = eight_bit.rounded(case, of_mlp, lambda name, like: dy.to(dtype).reshape(like.shape))
    arriving = [(x, found.pop("dx").view_as(x))] + ([] if dsum is None else [(total, dsum)])
    given = [name for name in leaves if name not in ("up", "down", "n_keys")]
    outputs, upstreams = zip(*arriving, strict=True)
    gradients = grad(outputs, [leaves[name] for name in given], upstreams)
    found["y"] = found["y"].view_as(y)
    return found | {f"d{name}": x for name, x in zip(given, gradients, strict=True)}


def out_of_range(case, inputs):
    """Yields numbers of keys that spoil their sample, and so the gradients of all weights."""
    from torch import ones

    of_sample = ("sum", "y", "dh", "dupdate")
    found = numbers_out_of_range(inputs, "n_keys", 1, case.problem["n_k"], *of_sample)
    for wrong, nearest, spoiled in found:
        device = wrong["n_keys"].device
        weights = {f"d{name}": ones(len(inputs[name]), dtype=bool, device=device)
                   for name in WEIGHTS}  # fmt: skip
        yield wrong, nearest, spoiled | weights


def compiled(target) -> Iterator[Problem]:
    """Yields the model's block at one size, and with an MLP in 8 bits: its norm is a kernel."""
    if target.capability >= 80:
        sizes = {"batch": 64, "rows": 564, "d_model": 512, "d_ff": 1408, "n_heads": 8}
        yield OPERATOR.problem("bfloat16", **sizes, n_q=564, n_k=64, update=True)
        if target.capability in EVERY_DTYPE_ON:
            yield OPERATOR.problem("bfloat16", **sizes, n_q=564, n_k=64, update=True, mlp="e4m3")


def within(model, run):
    """Returns the problem of the blocks after the first, or None without context points."""
    if "n_context" not in run:
        return None
    rows = run["n_context"] + run["n_target"]
    return OPERATOR.problem(
        run["dtype"], batch=run["batch"], rows=rows, d_model=model["d_model"],
        d_ff=model.get("d_ff_storage") or model["d_ff"], n_heads=model["n_heads"], n_q=rows,
        n_k=run["n_context"], update=True,
    )  # fmt: skip


def _update_left_out(h, update, *others, **options):
    total, y = reference(h, update, *others, **options)
    return total - (0 if update is None else update[:, -total.shape[1] :]), y


def _queries_shifted(h, *others, **options):
    total, y = reference(h, *others, **options)
    return total, y.roll(1, 1)


def _weight_halved(name: str):
    def broken(*inputs, **options):
        at = OPERATOR.tensors.index(name)
        return reference(*inputs[:at], inputs[at] * 0.5, *inputs[at + 1 :], **options)

    return broken


OPERATOR = Operator(
    "transformer_block",
    inputs=("h", "update?", *WEIGHTS, "n_keys?"),
    outputs=("sum", "y"),
    sizes=("batch", "rows", "d_model", "d_ff", "n_heads", "n_q", "n_k"),
    numbered=("n_heads", "n_q", "n_k"),
    options={"centred": bool} | dict.fromkeys(LAYERS, str),
    laid_out_by=("centred", *LAYERS),
    differentiated=("h", "update", *WEIGHTS),
    keeps=("h", *WEIGHTS, "n_keys", "sum"),
    scalars={"eps": norms.EPS},
    implementations=(
        *by_pytorch(reference, TAKEN),
        compiled_sdpa(sdpa, TAKEN),
        Implementation(
            "fused",
            forward=Operation("transformer_block.forward", (f"{__name__}.composed:FORWARD",)),
            backward=Operation(
                "transformer_block.backward",
                tuple(
                    f"{__name__}.composed:{name}" for name in ("DETERMINISTIC", "NONDETERMINISTIC")
                ),
            ),
            supported=supported,
            options=(*TAKEN, *LAYERS),
            budget=Budget(rounded=rounded),
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    out_of_range=out_of_range,
    within=within,
    compiled=compiled,
    controls={
        "update left out": _update_left_out,
        "rows of y shifted": _queries_shifted,
        **{f"{name} halved": _weight_halved(name) for name in ("qkv", "output", "norm_mlp")},
    },
)


def transformer_block(
    h: Tensor,
    update: Tensor | None,
    weights: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    n_heads: int,
    *,
    n_k: int | None = None,
    first: int = 0,
    n_keys: Tensor | None = None,
    centred: bool = False,
    eps: float = norms.EPS,
    layers: tuple[tuple[str, str], ...] = (),
    implementation: str = "torch",
    or_none: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """Runs one block, and returns the residual stream and the update that the next block adds.

    Args:
        h: [B, L, d_model], in a dtype that `linear` takes.
        update: a tensor like h that the block adds to h first, or None.
        weights: tensors in the order of `WEIGHTS`: norms [d_model], qkv [3·d_model, d_model],
            output [d_model, d_model], up [d_ff, d_model], down [d_model, d_ff]; any float dtype.
        n_heads: heads of attention.
        n_k: how many of the first rows are keys and values, from 1 to L. None: L.
        first: the first row that is a query; rows before it are not returned.
        n_keys: int32 [B], the number of keys of each sample, from 1 to n_k; None: n_k. A number out
            of range is a ValueError on a CPU. On a GPU it makes its sample NaN, and with
            TNP_CHECK=1 it ends in an assertion.
        centred: whether keys are centred (see `project_qkv`).
        eps: a number, positive and finite, for both norms.
        layers: pairs of a name of `LAYERS` and the implementation of that layer, for `fused`. A
            layer that is left out takes the best of ours.
        implementation: a name of `tnp.dispatch.registry`, or "auto".
        or_none: whether to return None if the implementation cannot run here. For example, `fused`
            cannot if tables choose a layer that is not ours.

    Returns:
        h₂ and y of the equations above, both [B, L − first, d_model] in h's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        RuntimeError: the implementation cannot run here, with the reason, unless `or_none`.
    """
    import tnp.dispatch.call as dispatch

    if type(eps) is not float or not 0.0 < eps < inf:
        eps = positive_number("eps", eps)
    # `index` makes torch.compile take a symbolic number as a constant of the graph.
    options: tuple = (("n_heads", index(n_heads)),)
    if first:
        options += (("n_q", index(h.shape[1] - first) if h.dim() == 3 else 1),)
    if n_k is not None:
        options += (("n_k", index(n_k)),)
    if n_keys is not None and getattr(h, "ndim", 0) == 3:  # else `describe` refuses
        require_between("n_keys", n_keys, 1, h.shape[1] if n_k is None else n_k)
    if centred:
        options += (("centred", True),)
    inputs = (h, update, *weights, n_keys)
    return dispatch.call(OPERATOR, implementation, inputs, (eps,), options + layers, or_none)
