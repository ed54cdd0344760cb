"""Rotary position embedding of queries and keys together.

Pair i of a head's D elements is rotated by the angle of its token's position,

    (a, b) → (a·cos − b·sin, b·cos + a·sin)        cos, sin = tables[position, i]

where a and b are elements i and i + D/2 (pairing "half": Llama, Hugging Face), or 2i and 2i + 1
("interleaved": the paper, GPT-J). Gradients are rotated back. (Su et al., RoFormer, arXiv
2104.09864.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tnp.contract import FLOATS, Case, Operator, Problem, Work
from tnp.inputs import require_alike
from tnp.ops.declared import by_pytorch, by_triton, cases_by_dtype

if TYPE_CHECKING:
    from torch import Tensor

PAIRINGS = ("half", "interleaved")
THETA = 10000.0


def reference(q, k, cos, sin, positions=None, *, interleaved=False):
    """Hugging Face's formula; where tables are wider than q, in their dtype and rounded once."""
    import torch

    n_tokens = q.shape[2]
    if positions is None:
        cos, sin = cos[:n_tokens], sin[:n_tokens]
    else:
        cos, sin = cos[positions.long()].unsqueeze(1), sin[positions.long()].unsqueeze(1)
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def rotate_half(x):
        if interleaved:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    return tuple((x * cos + rotate_half(x) * sin).to(x.dtype) for x in (q, k))


def describe(q, k, cos, sin, positions=None, interleaved=False) -> dict:
    """Sizes; ValueError where the tensors do not go together."""
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4:
            raise ValueError(f"{name} is {tuple(x.shape)}: it must be [batch, heads, tokens, D]")
    batch, heads, n_tokens, head_dim = q.shape
    kv_heads = k.shape[1]
    if (k.shape[0], k.shape[2], k.shape[3]) != (batch, n_tokens, head_dim):
        raise ValueError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}: they may differ in their heads alone"
        )
    require_alike(q=q, k=k)
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}: it must be even, since elements turn in pairs")
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[1] != head_dim // 2:
        raise ValueError(
            f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}: both must be "
            f"[n_positions, {head_dim // 2}], half of head_dim"
        )
    if cos.dtype != sin.dtype or str(cos.dtype) not in ("torch.float32", str(q.dtype)):
        raise ValueError(
            f"cos is {cos.dtype} and sin {sin.dtype}: both must be float32 or both q's {q.dtype}"
        )
    if cos.device != q.device or sin.device != q.device:
        raise ValueError(
            f"cos is on {cos.device}, sin on {sin.device} and q on {q.device}: "
            "they must lie together"
        )
    if positions is None:
        if cos.shape[0] < n_tokens:
            raise ValueError(
                f"cos and sin have {cos.shape[0]} positions and q {n_tokens} tokens: without "
                "positions they must have as many"
            )
    elif positions.shape != (batch, n_tokens) or positions.device != q.device:
        raise ValueError(
            f"positions are {tuple(positions.shape)} on {positions.device}: they must be "
            f"[{batch}, {n_tokens}] on {q.device}"
        )
    elif str(positions.dtype) not in ("torch.int32", "torch.int64"):
        raise ValueError(f"positions are {positions.dtype}: they must be int32 or int64")
    elif cos.shape[0] == 0:
        raise ValueError("cos and sin have no positions: they must have at least one")
    return {
        "batch": batch, "heads": heads, "kv_heads": kv_heads,
        "n_tokens": n_tokens, "head_dim": head_dim,
    }  # fmt: skip


def draw(case, random) -> dict:
    """q and k as views of one projection of q, k and v, or "heads_first" each on its own.

    Tables hold true angles, in the activations' dtype or, "wide_tables", in float32.
    """
    import torch

    problem = case.problem
    batch, n_tokens, head_dim = problem["batch"], problem["n_tokens"], problem["head_dim"]
    heads, kv_heads = problem["heads"], problem["kv_heads"]
    if case["heads_first"]:
        q = random(batch, heads, n_tokens, head_dim)
        k = random(batch, kv_heads, n_tokens, head_dim)
    else:
        projection = random(batch, n_tokens, heads + 2 * kv_heads, head_dim)
        parts = projection.split((heads, kv_heads, kv_heads), dim=2)
        q, k = (part.transpose(1, 2) for part in parts[:2])
    positions, n_positions = None, n_tokens
    if problem["positions"]:
        n_positions = 2 * n_tokens + 3
        positions = random.integers(0, n_positions - 1, batch, n_tokens)
    like = {"dtype": torch.float32, "device": random.device}
    frequencies = THETA ** (-torch.arange(0, head_dim, 2, **like) / head_dim)
    angles = torch.arange(n_positions, **like)[:, None] * frequencies
    dtype = torch.float32 if case["wide_tables"] else random.dtype
    tables = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
    return {"q": q, "k": k, **tables, "positions": positions}


def work(case, pass_) -> Work:
    """q, k and as many rows of the tables as there are positions, once; both passes alike."""
    problem = case.problem
    n_tokens, head_dim = problem["n_tokens"], problem["head_dim"]
    heads = problem["heads"] + problem["kv_heads"]
    size = problem["batch"] * heads * n_tokens * head_dim * problem.itemsize
    table = n_tokens * head_dim * (4 if case["wide_tables"] else problem.itemsize)
    return Work({}, size + table, size)


def cases(target) -> list[Case]:
    """Grouped and odd numbers of heads, every kind of head_dim, both pairings, positions."""
    positions, interleaved = {"positions": True}, {"interleaved": True}
    heads_first, wide = {"heads_first": True}, {"wide_tables": True}
    if target.kind == "cuda":
        drawn = [
            (8, 32, 8, 2048, 128, {}),
            (3, 32, 8, 777, 128, positions | heads_first | wide),
            (2, 12, 12, 1000, 64, interleaved | wide),
            (64, 25, 5, 1, 96, positions),
            (2, 8, 8, 256, 48, positions | interleaved | heads_first),
            (1, 10, 10, 4097, 80, wide),
            (2, 3, 1, 33, 6, interleaved),
            (1, 64, 8, 512, 256, {}),
        ]
    else:
        drawn = [
            (1, 1, 1, 3, 2, {}),
            (2, 4, 2, 5, 16, wide),
            (1, 3, 1, 6, 48, positions | heads_first),
            (2, 4, 4, 3, 80, positions | interleaved | wide),
            (1, 2, 2, 7, 6, interleaved),
        ]
    return cases_by_dtype(OPERATOR, dict.fromkeys(FLOATS, drawn))


def within(model, run) -> Problem | None:
    """In a language model with rotary positions."""
    if not model.get("rope"):
        return None
    return OPERATOR.problem(
        run["dtype"], batch=run["batch"], heads=model["n_heads"],
        kv_heads=model.get("n_kv_heads", model["n_heads"]), n_tokens=run["n_tokens"],
        head_dim=model["head_dim"],
    )  # fmt: skip


def _other_pairing(q, k, cos, sin, positions=None, *, interleaved=False):
    return reference(q, k, cos, sin, positions, interleaved=not interleaved)


def _next_position(q, k, cos, sin, positions=None, *, interleaved=False):
    tables = (table.roll(-1, 0) for table in (cos, sin))
    return reference(q, k, *tables, positions, interleaved=interleaved)


def _turned_back(q, k, cos, sin, positions=None, *, interleaved=False):
    return reference(q, k, cos, -sin, positions, interleaved=interleaved)


_OPTIONS = ("interleaved", "positions")
OPERATOR = Operator(
    "rope",
    inputs=("q", "k", "cos", "sin", "positions?"),
    outputs=("q_rotated", "k_rotated"),
    sizes=("batch", "heads", "kv_heads", "n_tokens", "head_dim"),
    differentiated=("q", "k"),
    options={"interleaved": bool},
    keeps=("cos", "sin", "positions"),
    implementations=(
        *by_pytorch(reference, _OPTIONS),
        by_triton("triton", "rope", "tnp.ops.rope.triton_rope", options=_OPTIONS),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    controls={
        "the other pairing": _other_pairing,
        "a position further": _next_position,
        "turned back": _turned_back,
    },
    within=within,
    fixed=("head_dim",),
)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    pairing: str = "half",
    implementation: str = "torch",
) -> tuple[Tensor, Tensor]:
    """q and k, each pair of elements rotated by its token's position.

    Args:
        q: [batch, heads, tokens, D], D even; any strides. Views of a fused projection are read
            where they lie.
        k: [batch, kv_heads, tokens, D] in q's dtype.
        cos, sin: [n_positions, D/2], both float32 or both in q's dtype; no gradient.
        positions: [batch, tokens], int32 or int64, from 0 to n_positions − 1. Past them ours takes
            the nearest that there is; with TNP_CHECK=1 in the environment when a shape is first
            met, it asserts that there is none. None: 0, 1, … in every sequence.
        pairing: "half" for elements i and i + D/2, "interleaved" for 2i and 2i + 1.
        implementation: a name of `tnp.catalog`, or "auto".

    Returns:
        Both rotated, shaped as they came and in their dtype. From ours memory is in the input's
        order: [batch, tokens, heads, D] where a token's heads lie together.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together, or no such pairing.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch as dispatch

    if pairing not in PAIRINGS:
        raise ValueError(f"pairing is {pairing!r}: choose from {', '.join(PAIRINGS)}")
    options = (("interleaved", True),) if pairing == "interleaved" else ()
    return dispatch.call(OPERATOR, implementation, (q, k, cos, sin, positions), (), options)
