"""Defines attention around a causal buffer: its inputs, their work, its mask, and its
gate's cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tnp.dispatch.devices import Target
from tnp.dispatch.spec import (
    EVERY_DTYPE_ON,
    Call,
    Case,
    Operator,
    Problem,
    Reason,
    Work,
    lacks_shared,
    triton_from,
)
from tnp.ops._shared.declared import numbers_out_of_range
from tnp.ops.attention import cases as of_attention
from tnp.ops.attention.definition import SCALE
from tnp.ops.attention.torch_forms import LN_2, attend, softmax_scale

if TYPE_CHECKING:
    from torch import Tensor

    from tnp.ops._shared.random_values import Random

TAKEN = ("all_rows", "base2", "n_groups", "n_keys")  # options that every implementation takes
BLOCK_N = 64  # keys of a block
MOST_BLOCKS = 4  # blocks that the kernels keep on chip
HEAD_DIMS = (16, 32, 64)
FLOAT32_BYTES = 139_264  # of shared memory, with the most blocks
FLOAT32_HEAD_DIMS = (32,)  # on a GPU, where other tiles spill or do not fit shared memory
_triton = triton_from(80)


@dataclass(frozen=True)
class Rows:
    """Counts rows of q: first rows of the context, then rows beside the buffer, then other rows."""

    n_context: int
    n_buffer: int
    n_first: int
    n_beside: int
    n_q: int

    @classmethod
    def of(cls, problem: Problem) -> Rows:
        """Returns the rows of a problem."""
        n, n_q = int(problem["n_buffer"]), int(problem["n_q"])
        n_groups, whole = int(problem["n_groups"]), bool(problem["all_rows"])
        return cls.counted(int(problem["n_k"]) - n, n, n_groups, whole, n_q)

    @classmethod
    def counted(
        cls, n_context: int, n_buffer: int, n_groups: int, all_rows: bool, n_q: int
    ) -> Rows:
        """Returns the rows of these sizes. With all_rows, context and buffer come first."""
        n_beside = (n_groups + all_rows) * n_buffer
        return cls(n_context, n_buffer, n_context if all_rows else 0, n_beside, n_q)

    @property
    def n_alone(self) -> int:
        """Returns how many rows see only the context."""
        return self.n_q - self.n_beside

    @property
    def n_groups(self) -> int:
        """Returns how many groups of rows are beside the buffer, with the buffer's own rows."""
        return self.n_beside // self.n_buffer


def n_blocks(problem: Problem) -> tuple[int, int]:
    """Returns how many blocks of keys the context has, and how many the buffer."""
    rows = Rows.of(problem)
    return -(-rows.n_context // BLOCK_N), -(-rows.n_buffer // BLOCK_N)


def visible(
    q: Tensor, k: Tensor, n_keys: Tensor | None, n_buffer: int, n_groups: int, all_rows: bool,
    more: int = 0,
) -> Tensor:  # fmt: skip
    """Returns whether a row sees a key: bool, broadcast to [B, 1, n_q, n_k].

    Rows beside the buffer see `more` points more than they should.
    """
    import torch

    rows = Rows.counted(k.shape[2] - n_buffer, n_buffer, n_groups, all_rows, q.shape[2])
    key = torch.arange(k.shape[2], device=k.device)
    at = torch.arange(rows.n_q, device=k.device)[:, None] - rows.n_first
    beside = (at >= 0) & (at < rows.n_beside)
    of_buffer = beside & (key >= rows.n_context) & (key - rows.n_context <= at % n_buffer + more)
    of_context = key < rows.n_context
    if n_keys is not None:
        of_context = of_context & (key < n_keys[:, None, None, None])
    return of_context | of_buffer


def reference(
    q, k, v, n_keys, scale, n_buffer, n_groups=0, all_rows=False, base2=False
) -> Tensor:  # fmt: skip
    """Returns softmax(scale · q kᵀ) v under one explicit mask, in any float dtype."""
    seen = visible(q, k, n_keys, n_buffer, n_groups, all_rows)
    return attend(q, k, v, seen, softmax_scale(scale, base2))


def sdpa(
    q, k, v, n_keys, scale, n_buffer, n_groups=0, all_rows=False, base2=False
) -> Tensor:  # fmt: skip
    """Returns what `reference` does, by PyTorch's SDPA. Scores are not written to memory."""
    from torch.nn.functional import scaled_dot_product_attention

    seen = visible(q, k, n_keys, n_buffer, n_groups, all_rows)
    return scaled_dot_product_attention(q, k, v, seen, scale=softmax_scale(scale, base2))


def draw(case: Case, random: Random) -> dict[str, Tensor | None]:
    """Returns q, k, v, views of one projection [B, L, 3 H, D] as in a model, from row `start` on.

    `magnitude` scales q and k. `lengths`, "7,40", are n_keys, else random. With base2, q carries
    the scale.
    """
    import torch

    p, drawn = case.problem, dict(case.draw)
    batch, n_heads, n_q, n_k, head_dim, n_buffer = (size for _, size in p.sizes)
    start = int(drawn.get("start", 0))
    projection = random(batch, start + max(n_q, n_k), 3 * n_heads, head_dim)[:, start:]
    q, k, v = (x.transpose(1, 2) for x in projection.chunk(3, 2))
    for x in (q, k):
        x *= drawn.get("magnitude", 1.0)
    if p["base2"]:
        q *= SCALE / LN_2
    tensors = {"q": q[:, :, :n_q], "k": k[:, :, :n_k], "v": v[:, :, :n_k]}
    if "lengths" in drawn:
        numbers = [int(length) for length in str(drawn["lengths"]).split(",")]
        tensors["n_keys"] = torch.tensor(numbers, dtype=torch.int32, device=q.device)
    elif p["n_keys"]:
        tensors["n_keys"] = random.integers(1, n_k - n_buffer, batch)
    return tensors


def other_lengths(inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    n_keys = inputs["n_keys"]
    return {} if n_keys is None else {"n_keys": (n_keys + 1) // 2}


def out_of_range(
    case: Case, inputs: Mapping[str, Tensor | None]
) -> Iterator[tuple[dict, dict, dict]]:
    """Yields invalid n_keys, and where results become NaN: in their sample."""
    n_context = Rows.of(case.problem).n_context
    results = ("o", "dq", "dk", "dv")
    for wrong, _, spoiled in numbers_out_of_range(inputs, "n_keys", 1, n_context, *results):
        yield wrong, {}, spoiled


def work(case: Case, pass_: str) -> Work:
    """Returns the work: two products forward, and five backward, which computes scores again.

    It counts pairs of a row and a key that it sees. Points of the context past n_keys count too.
    """
    p = case.problem
    rows, heads = Rows.of(p), p["batch"] * p["n_heads"]
    pairs = rows.n_q * rows.n_context + rows.n_beside * (rows.n_buffer + 1) // 2
    flops = {"forward": 2.0, "backward": 5.0}[pass_] * 2 * heads * pairs * p["head_dim"]
    row = heads * p["head_dim"] * p.itemsize
    of_q, of_k = row * rows.n_q, row * p["n_k"]
    if pass_ == "forward":
        return Work({p.dtype: flops}, of_q + 2 * of_k, of_q)
    return Work({p.dtype: flops}, 2 * of_q + 2 * of_k, of_q + 2 * of_k)


def supported(call: Call) -> Reason:
    """Returns why the kernels cannot serve a call, or None."""
    if (reason := _triton(call)) is not None:
        return reason
    p = call.problem
    rows = Rows.of(p)
    if sum(n_blocks(p)) > MOST_BLOCKS:
        return (
            f"it keeps {MOST_BLOCKS} blocks of {BLOCK_N} keys on chip, and {rows.n_context} points "
            f"of the context with {rows.n_buffer} of the buffer are {sum(n_blocks(p))}"
        )
    narrow = p.dtype == "float32" and call.target.kind == "cuda"
    head_dims = FLOAT32_HEAD_DIMS if narrow else HEAD_DIMS
    if p["head_dim"] not in head_dims:
        taken = ", ".join(map(str, head_dims))
        return f"it takes head_dim {taken} in {p.dtype}, not {p['head_dim']}"
    return lacks_shared(call, FLOAT32_BYTES) if narrow else None


def condition(operator: Operator, case: Case, inputs: Mapping) -> dict[str, float]:
    """Returns the relative errors of float32, as for attention under the same mask."""
    p = case.problem
    q, k, v, n_keys = (inputs[name] for name in operator.tensors)
    seen = visible(q, k, n_keys, p["n_buffer"], int(p["n_groups"]), bool(p["all_rows"]))
    found = of_attention.lost(q, k, v, softmax_scale(SCALE, p["base2"]), seen)
    return {name: found[name] for name in ("o", "dq", "dk", "dv")}


# ------------------------------------------------------------------------------ cases of the gate


def cases(operator: Operator, target: Target) -> Iterable[Case]:
    """Returns the gate's cases.

    They have points of the context and of the buffer on both sides of every tile's edge, no to many
    groups, no to many other rows, and q with and without rows of the context and the buffer.
    """

    def case(m, n, groups, others, whole=True, batch=1, heads=2, d=64, dtype="bfloat16", **named):
        n_q = (m if whole else 0) + (groups + whole) * n + others
        options = {"n_groups": groups, "all_rows": whole, "n_keys": "lengths" in named}
        return operator.case(dtype, batch, heads, n_q, m + n, d, n, **options | named)

    if target.kind != "cuda":
        return (
            case(5, 3, 1, 4, heads=1, d=16, dtype="float32"),
            case(17, 20, 2, 7, heads=1, d=16, dtype="float32"),
            case(65, 70, 1, 5, heads=1, d=16),
            case(20, 66, 1, 30, False, heads=1, d=16),
            case(9, 5, 0, 0, d=16, dtype="float32"),
            case(33, 17, 1, 3, d=16, dtype="float16"),
            case(70, 5, 2, 3, heads=1, batch=2, d=16, dtype="float32", lengths="7,70"),
            case(20, 5, 2, 3, False, heads=1, batch=2, d=16, lengths="7,20", base2=True),
            case(20, 10, 1, 5, heads=1, d=16, dtype="float32", magnitude=30.0),
            case(20, 10, 1, 5, heads=1, d=16, magnitude=12.0),
            case(33, 70, 1, 20, heads=1, base2=True, start=1),
        )
    edges = (1, 63, 64, 65, 100, 127, 128)
    return (
        *(case(m, 70, 1, 90) for m in edges),
        *(case(70, n, groups, 90) for n in edges for groups in (0, 1, 2)),
        *(case(m, n, 1, 100, False) for m in (1, 64, 128) for n in edges),
        *(case(64, 128, groups, others) for groups in (0, 1, 3) for others in (0, 1, 372)),
        *(case(64, 128, groups, 1, False) for groups in (0, 2)),
        case(100, 16, 15, 260),
        case(64, 5, 50, 250, False),
        case(64, 128, 1, 372, batch=64, heads=8),
        case(64, 128, 1, 372, batch=64, heads=8, base2=True),
        case(64, 128, 1, 372, False, batch=3, heads=8, base2=True, start=64 + 128),
        *(case(100, 100, 2, 77, batch=2, d=d) for d in (16, 32)),
        *(case(100, n, 2, 77, dtype="float16") for n in (60, 100)),
        *(case(m, n, 1, 77, d=32, dtype="float32") for m in (60, 100) for n in (60, 100)),
        *(case(64, 100, 1, 77, magnitude=size) for size in (0.0, 2.5, 8.0, 12.0, 40.0)),
        *(case(64, 100, 1, 77, magnitude=size, base2=True) for size in (4.0, 40.0)),
        *(case(30, 60, 1, 77, dtype="float32", d=32, magnitude=size) for size in (8.0, 30.0)),
        case(64, 128, 1, 372, batch=4, heads=8, lengths="1,20,63,64"),
        case(128, 65, 2, 90, batch=3, lengths="1,65,128"),
        case(100, 50, 2, 90, False, batch=2, lengths="7,100", base2=True),
        case(100, 50, 1, 90, batch=2, d=32, dtype="float32", lengths="7,100"),
    )


def _seeing(more: int) -> object:
    """Returns the reference with rows beside the buffer that see `more` points more."""

    def broken(q, k, v, n_keys, scale, n_buffer, n_groups=0, all_rows=False, base2=False):
        seen = visible(q, k, n_keys, n_buffer, n_groups, all_rows, more)
        return attend(q, k, v, seen, softmax_scale(scale, base2))

    return broken


def _context_rows_see_the_buffer(q, k, v, n_keys, scale, n_buffer, base2=False, **kind):
    o = reference(q, k, v, n_keys, scale, n_buffer, base2=base2, **kind)
    if not kind.get("all_rows"):
        return o
    import torch

    m = k.shape[2] - n_buffer
    of_all = attend(q[:, :, :m], k, v, None, softmax_scale(scale, base2))
    return torch.cat([of_all, o[:, :, m:]], 2)


def _others_see_the_buffer(q, k, v, n_keys, scale, n_buffer, base2=False, **kind):
    o = reference(q, k, v, n_keys, scale, n_buffer, base2=base2, **kind)
    rows = Rows.counted(
        k.shape[2] - n_buffer, n_buffer, kind.get("n_groups", 0), kind.get("all_rows", False),
        q.shape[2],
    )  # fmt: skip
    end = rows.n_first + rows.n_beside
    import torch

    of_all = attend(q[:, :, end:], k, v, None, softmax_scale(scale, base2))
    return torch.cat([o[:, :, :end], of_all], 2)


def _scaled_all_the_same(*arguments, base2=False, **kind):
    return reference(*arguments, **kind)


def _keys_and_values_exchanged(q, k, v, *rest, **kind):
    return reference(q, v, k, *rest, **kind)


def _context_without_lengths(q, k, v, n_keys, *rest, **kind):
    return reference(q, k, v, None, *rest, **kind)


CONTROLS = {
    "the diagonal one off": _seeing(1),
    "rows beside the buffer see a point too few": _seeing(-1),
    "context rows see the buffer": _context_rows_see_the_buffer,
    "others see the buffer": _others_see_the_buffer,
    "base2 and scaled all the same": _scaled_all_the_same,
    "keys and values exchanged": _keys_and_values_exchanged,
    "padding of the context is seen": _context_without_lengths,
}


# ---------------------------------------------------------------------------------- the compiler


def compiled(operator: Operator, target: Target) -> Iterable[Problem]:
    """Returns problems for which kernels are compiled.

    They have every number of blocks, with n_keys, which need more registers. Every other dtype and
    head_dim has the most blocks. Few heads leave partials.
    """

    def problem(m, n, dtype="bfloat16", head_dim=64, batch=64, **options) -> Problem:
        sizes = {"batch": batch, "n_heads": 8, "n_q": m + 2 * n + 300, "n_k": m + n}
        sizes |= {"head_dim": head_dim, "n_buffer": n}
        return operator.problem(dtype, **sizes, all_rows=True, n_groups=1, **options)

    points = 64, 128
    found = [problem(m, n, n_keys=True) for m in points for n in points]
    found += [problem(64, 128, base2=True), problem(64, 128, batch=1)]
    if target.capability in EVERY_DTYPE_ON:
        for dtype, head_dims in (("bfloat16", (16, 32)), ("float32", FLOAT32_HEAD_DIMS)):
            found += [problem(128, 128, dtype, one, n_keys=True) for one in head_dims]
        found.append(problem(64, 128, "float16", n_keys=True))
    return found
