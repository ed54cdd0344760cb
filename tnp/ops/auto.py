"""Which implementation of an operator runs where "auto" was asked for.

`tuned/implementations.json` holds the fastest of forward and backward together, one entry a line,
by operator, compute capability, dtype and sizes, as `snakemake tune` and `python -m tnp.tune` timed
them. A call takes the entry of its own sizes, or of the nearest whose implementation can run it,
nearest by the sum of |log2| of the sizes' ratios. On a GPU of which the table knows nothing ours
run at the compute capabilities of `OURS_ON`; elsewhere PyTorch does. Every decision is logged to
`tnp.auto` the first time it is made for sizes of a power of two, and listed by `choices()`.
"""

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import index
from pathlib import Path
from typing import Any

import torch

from tnp.ops import registry
from tnp.ops.tables import write_entries

TABLE = Path(__file__).parent / "tuned" / "implementations.json"
# Compute capabilities at which ours run where the table knows nothing. Some kernels need more
# shared memory than the 99 KB that a block has on 8.6, 8.9 and 12.0.
OURS_ON = (90, 100)
# An implementation earlier among the candidates, PyTorch's first, stays where it takes at most this
# much of the fastest's time: two runs differ by as much.
STAYS_BELOW = 1.01

# Sizes of an operator on rows by which entries are told apart: name → column of an "ops" row.
COLUMNS = {"d_model": "d_model", "d_ff": "d_ff_storage", "n_components": "n_components"}

Entry = dict[str, Any]  # "op", "capability", "dtype", "sizes" and "implementation"
Sizes = tuple[tuple[str, int], ...]
log = logging.getLogger("tnp.auto")


@dataclass(frozen=True)
class Choice:
    """`source` is "tuned" (an entry of these very sizes), "nearest" or "default".

    `refused` says why nothing of ours is preferred, or why what would have come first cannot run;
    "" where it can.
    """

    implementation: str
    source: str
    refused: str = ""

    def describe(self, launch: str | None = None) -> str:
        """As JSON, with the implementation's own `launch` (JSON) where it has one."""
        own = {"launch": json.loads(launch)} if launch else {}
        chosen = {"implementation": self.implementation, "source": self.source}
        return json.dumps(chosen | own)


_choices: dict[tuple[str, str, str, Sizes], Choice] = {}


def resolve(
    op: str, device: torch.device, dtype: torch.dtype, *, unserved: str = "", **sizes: int
) -> str:
    """The implementation that "auto" stands for.

    Args:
        op: an operator of `tnp.ops.registry`.
        device, dtype: of the activations.
        unserved: why PyTorch's plain form alone takes these inputs, "" where it does not.
        sizes: those of the table's entries (`sizes_of`) and of `registry.LIMITS`.
    """
    # `index` has torch.compile take a symbolic size for the number that it is.
    numbers = {name: index(size) for name, size in sizes.items()}
    return _decide(op, device, dtype, numbers, unserved)


@torch.compiler.assume_constant_result
def _decide(
    op: str, device: torch.device, dtype: torch.dtype, sizes: dict[str, int], unserved: str
) -> str:
    return choose(op, device, dtype, tuple(sizes.items()), unserved).implementation


@lru_cache(maxsize=4096)
def choose(
    op: str, device: torch.device, dtype: torch.dtype, sizes: Sizes, unserved: str = ""
) -> Choice:
    """What runs `op` at these sizes, (name, value) each; `unserved` as for `resolve`."""
    if unserved:
        choice = Choice(registry.CANDIDATES[op][0], "default", unserved)
    else:
        choice = _choose(op, device, dtype, dict(sizes))
    buckets = tuple((name, 1 << max(size - 1, 0).bit_length()) for name, size in sizes)
    key = (op, str(device), _name(dtype), buckets)
    if _choices.get(key) != choice:
        _choices[key] = choice
        values = ", ".join(f"{name} {size}" for name, size in sizes)
        where = f"{op} ({values}) on {device} in {_name(dtype)}"
        refused = f"; {choice.refused}" if choice.refused else ""
        log.info("%s: %s, %s%s", where, choice.implementation, choice.source, refused)
    return choice


def choices() -> list[dict[str, object]]:
    """What was decided so far, the last decision of each operator, device, dtype and bucket."""
    return [
        {"op": op, "device": device, "dtype": dtype, "up_to": dict(buckets)}
        | {name: getattr(choice, name) for name in ("implementation", "source", "refused")}
        for (op, device, dtype, buckets), choice in _choices.items()
    ]


def of_row(row: dict, device: torch.device) -> Choice:
    """What runs in an operator's benchmark, by the columns of its "ops" row."""
    return choose(row["op"], device, getattr(torch, _dtype_of(row)), tuple(sizes_of(row).items()))


def sizes_of(row: dict) -> dict[str, int]:
    """Of an operator's benchmark, by the columns of its "ops" row."""
    if row["op"] == "attention":
        sizes = {name: row[name] for name in ("n_q", "n_k", "head_dim")}
        return {"batch_heads": row["batch"] * row["n_heads"]} | sizes
    sizes = {name: row[column] for name, column in COLUMNS.items() if row.get(column) is not None}
    return {"rows": row["batch"] * row["n_q"]} | sizes


def training_ms(op: str, forward: float, backward: float) -> float:
    """What an operator's two passes take together; mixture_nll's backward is timed with both."""
    return backward if op == "mixture_nll" else forward + backward


def fastest(op: str, times: dict[str, float]) -> str:
    """Of the candidates with a time, the first that is as good as the fastest."""
    timed = [name for name in registry.CANDIDATES[op] if name in times]
    best = min(times[name] for name in timed)
    return next(name for name in timed if times[name] <= STAYS_BELOW * best)


def entry_of(row: dict, capability: int, implementation: str) -> Entry:
    """The entry that an operator's benchmark makes whose fastest was `implementation`."""
    return {
        "op": row["op"],
        "capability": capability,
        "dtype": _dtype_of(row),
        "sizes": sizes_of(row),
        "implementation": implementation,
    }


@cache
def table() -> tuple[Entry, ...]:
    return tuple(json.loads(TABLE.read_text()))


def write_table(entries: Iterable[Entry]) -> None:
    """Replace the table; a later one of `entries` takes the place of an earlier one of its key."""
    names = ("op", "capability", "dtype", "sizes")
    by_key = {json.dumps([entry[name] for name in names]): entry for entry in entries}
    write_entries(TABLE, [by_key[key] for key in sorted(by_key)])
    table.cache_clear()
    choose.cache_clear()


def _choose(op: str, device: torch.device, dtype: torch.dtype, sizes: dict[str, int]) -> Choice:
    candidates = registry.CANDIDATES[op]
    preferred, refused = _preferred(op, device, dtype, sizes)
    defaults = [(name, "default") for name in candidates]
    for name, source in preferred + defaults:
        reason = _unsupported(op, name, device, dtype, sizes)
        if reason is None:
            return Choice(name, source, refused)
        refused = refused or f"{name} cannot run here: {reason}"
    return Choice(candidates[0], "default", refused)  # which will say why it cannot run either


def _preferred(
    op: str, device: torch.device, dtype: torch.dtype, sizes: dict[str, int]
) -> tuple[list[tuple[str, str]], str]:
    """(implementation, source) in the order to be tried, or why there is none.

    What follows is PyTorch.
    """
    if device.type != "cuda":  # nobody tunes for Triton's interpreter
        return [], f"on the {device.type.upper()} kernels only run interpreted"
    if 0 in sizes.values():
        return [], "there is nothing to compute"
    major, minor = torch.cuda.get_device_capability(device)
    capability = 10 * major + minor

    def distance(entry: Entry) -> float:
        return sum(abs(math.log2(sizes[name] / size)) for name, size in entry["sizes"].items())

    known = [
        entry
        for entry in table()
        if (entry["op"], entry["capability"], entry["dtype"]) == (op, capability, _name(dtype))
        and entry["implementation"] in registry.CANDIDATES[op]
    ]
    if known:
        return [
            (entry["implementation"], "nearest" if distance(entry) else "tuned")
            for entry in sorted(known, key=distance)
        ], ""
    if capability in OURS_ON:
        return [("fused", "default")], ""
    measured = f"compute capability {major}.{minor} in {_name(dtype)}"
    return [], f"nothing was measured on {measured}: python -m tnp.tune"


def _unsupported(
    op: str, name: str, device: torch.device, dtype: torch.dtype, sizes: dict[str, int]
) -> str | None:
    reason = registry.get(op, name).unsupported(device, dtype)
    if reason is None and registry.role(op, name) == "own" and dtype.itemsize > 4:
        return f"it takes bfloat16, float16 or float32, not {dtype}"
    for size, taken in registry.LIMITS.get((op, name), {}).items():
        if reason is None and size in sizes and sizes[size] not in taken:
            reason = f"it does not take {size} {sizes[size]}"
    return reason


def _dtype_of(row: dict) -> str:
    # Whatever the model's dtype, the loss is computed in float32.
    return "float32" if row["op"] == "mixture_nll" else row["dtype"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
