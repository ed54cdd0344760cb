"""Defines rotary embeddings, alone and after norms: formula, inputs, work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tnp.dispatch.devices import Target
from tnp.dispatch.spec import FLOATS, Case, Operator, Problem, Work
from tnp.ops._shared.declared import cases_by_dtype
from tnp.util.checks import require_alike

if TYPE_CHECKING:
    from torch import Tensor

SIZES = ("batch", "heads", "kv_heads", "n_tokens", "head_dim")
OPTIONS = ("interleaved", "positions")
PAIRINGS = ("half", "interleaved")
THETA = 10000.0


def reference(q, k, cos, sin, positions=None, *, interleaved=False):
    """Computes Hugging Face's formula in the wider dtype of x and the tables, and rounds once."""
    import torch
    from torch.nn.functional import embedding

    n_tokens = q.shape[2]
    if positions is None:
        cos, sin = cos[:n_tokens], sin[:n_tokens]
    else:  # an index of -1 would read the last row
        cos, sin = (embedding(positions, table).unsqueeze(1) for table in (cos, sin))
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
    for name, x, heads in (("q", q, "heads"), ("k", k, "kv_heads")):
        if x.dim() != 4:
            raise ValueError(f"{name} is {tuple(x.shape)}: it must be [batch, {heads}, tokens, D]")
    batch, heads, n_tokens, head_dim = q.shape
    kv_heads = k.shape[1]
    if (k.shape[0], k.shape[2], k.shape[3]) != (batch, n_tokens, head_dim):
        raise ValueError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}: they may differ only in their heads"
        )
    require_alike(q=q, k=k)
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}: it must be even, for pairs of elements")
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
            "they must be on one device"
        )
    if positions is None:
        if cos.shape[0] < n_tokens:
            raise ValueError(
                f"cos and sin have {cos.shape[0]} positions and q {n_tokens} tokens: without "
                "positions they must have equally many"
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


def require_rows(positions: Tensor | None, cos: Tensor) -> None:
    """Raises ValueError for positions out of the tables' range, if the host knows them.

    It does not for tensors on a GPU, or while PyTorch compiles.
    """
    import torch

    plain = positions.__class__ is torch.Tensor and positions.device.type == "cpu"
    if not plain or torch.compiler.is_compiling() or not positions.numel():
        return
    if not isinstance(cos, torch.Tensor) or not len(cos):
        return  # `describe` refuses these
    least, most = (int(x) for x in positions.aminmax())
    if least < 0 or most >= len(cos):
        raise ValueError(
            f"positions lie between {least} and {most}: they must lie between 0 and "
            f"{len(cos) - 1}, the last row of cos and sin"
        )


def pairing_options(pairing: str) -> tuple:
    """Returns the options of a pairing. Raises ValueError for an unknown name."""
    if pairing not in PAIRINGS:
        raise ValueError(f"pairing is {pairing!r}: choose from {', '.join(PAIRINGS)}")
    return (("interleaved", True),) if pairing == "interleaved" else ()


def draw(case, random) -> dict:
    """Draws q and k as views of one projection of q, k and v, or with "heads_first" each by itself.

    Tables hold real angles, in the activations' dtype, or with "wide_tables" in float32.
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


def out_of_range(
    case: Case, inputs: Mapping[str, Tensor | None]
) -> Iterator[tuple[dict, dict, dict]]:
    """Yields a position past the tables and a negative one. Each spoils its token."""
    import torch

    positions = inputs["positions"]
    if positions is None:
        return
    wrong, where = positions.clone(), torch.zeros_like(positions, dtype=torch.bool)
    for at, number in ((0, 0), len(inputs["cos"])), ((-1, -1), -1):
        wrong[at], where[at] = number, True
    # dq and dk belong to tokens; the other gradients are sums over tokens.
    spoiled = dict.fromkeys(("q_rotated", "k_rotated", "dq", "dk"), where[:, None])
    yield {"positions": wrong}, {}, spoiled | dict.fromkeys(("dq_weight", "dk_weight"), where.any())


def of_heads(problem: Problem) -> float:
    heads = problem["batch"] * (problem["heads"] + problem["kv_heads"])
    return heads * problem["n_tokens"] * problem["head_dim"] * problem.itemsize


def of_tables(case: Case) -> float:
    """Returns the bytes of one row of the tables for each position."""
    problem = case.problem
    itemsize = 4 if case["wide_tables"] else problem.itemsize
    return problem["n_tokens"] * problem["head_dim"] * itemsize


def work(case, pass_) -> Work:
    """Counts q, k and the tables once, in both passes."""
    size = of_heads(case.problem)
    return Work({}, size + of_tables(case), size)


_POSITIONS, _BY_TWOS = {"positions": True}, {"interleaved": True}
_HEADS_FIRST, _WIDE = {"heads_first": True}, {"wide_tables": True}
_GPU = [
    (8, 32, 8, 2048, 128, {}),
    (3, 32, 8, 777, 128, _POSITIONS | _HEADS_FIRST | _WIDE),
    (2, 12, 12, 1000, 64, _BY_TWOS | _WIDE),
    (64, 25, 5, 1, 96, _POSITIONS),
    (2, 8, 8, 256, 48, _POSITIONS | _BY_TWOS | _HEADS_FIRST),
    (1, 10, 10, 4097, 80, _WIDE),
    (2, 3, 1, 33, 6, _BY_TWOS),
    (1, 64, 8, 512, 256, {}),
]
_INTERPRETED = [
    (1, 1, 1, 3, 2, {}),
    (2, 4, 2, 5, 16, _WIDE),
    (1, 3, 1, 6, 48, _POSITIONS | _HEADS_FIRST),
    (2, 4, 4, 3, 80, _POSITIONS | _BY_TWOS | _WIDE),
    (1, 2, 2, 7, 6, _BY_TWOS),
]


def cases(operator: Operator, target: Target) -> list[Case]:
    """Covers grouped and odd numbers of heads, every kind of head_dim, both pairings, positions."""
    drawn = _GPU if target.kind == "cuda" else _INTERPRETED
    return cases_by_dtype(operator, dict.fromkeys(FLOATS, drawn))


def within(operator: Operator, model: Mapping, run: Mapping, qk_norm: bool) -> Problem | None:
    """Returns the problem of a language model with rotary positions, with or without norms."""
    if not model.get("rope") or model.get("qk_norm", False) != qk_norm:
        return None
    return operator.problem(
        run["dtype"], batch=run["batch"], heads=model["n_heads"],
        kv_heads=model.get("n_kv_heads", model["n_heads"]), n_tokens=run["n_tokens"],
        head_dim=model["head_dim"],
    )  # fmt: skip
