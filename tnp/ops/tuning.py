"""Which kernel and which configuration a problem runs with.

`tuned/attention.json` holds the winners of `snakemake tune`, one a line, by operation, dtype,
head_dim, compute capability and bucket: batch · heads, n_q and n_k, each rounded up to a power of
two. A problem takes the entry of its own bucket, or of the nearest one whose kernel and
configuration can serve it; where the table has none, the default.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tnp.ops.tables import write_entries

if TYPE_CHECKING:
    from tnp.ops.attention.kernels import Problem

TABLE = Path(__file__).parent / "tuned" / "attention.json"
FIXED = ("operation", "dtype", "head_dim", "capability")
BUCKET = ("batch_heads", "n_q", "n_k")
KEY = FIXED + BUCKET

Entry = dict[str, Any]  # `KEY`, "kernel" and "config"


@dataclass(frozen=True)
class Choice:
    """`source` is "tuned" (the entry of the problem's own bucket), "nearest" or "default"."""

    kernel: str
    config: Any
    source: str

    def describe(self) -> str:
        """As JSON: kernel, source, and the configuration's fields."""
        return json.dumps({"kernel": self.kernel, "source": self.source} | asdict(self.config))


@cache
def table() -> tuple[Entry, ...]:
    return tuple(json.loads(TABLE.read_text()))


def write_table(entries: Iterable[Entry]) -> None:
    """Replace the table; a later one of `entries` takes the place of an earlier one of its key."""
    by_key = {tuple(entry[name] for name in KEY): entry for entry in entries}
    write_entries(TABLE, [by_key[key] for key in sorted(by_key)])
    table.cache_clear()
    choose.cache_clear()


@cache
def choose(problem: "Problem") -> Choice:
    """The kernel and configuration that `problem` is launched with."""
    key = key_of(problem)

    def distance(entry: Entry) -> float:
        return sum(abs(math.log2(entry[name] / key[name])) for name in BUCKET)

    comparable = [entry for entry in table() if all(entry[name] == key[name] for name in FIXED)]
    for entry in sorted(comparable, key=distance):
        config = config_of(entry, problem)
        if config is not None:
            return Choice(entry["kernel"], config, "nearest" if distance(entry) else "tuned")
    kernel, config = next(candidates(problem), (None, None))
    if kernel is None:
        raise RuntimeError(f"no kernel serves {problem}")
    return Choice(kernel, config, "default")


def candidates(problem: "Problem") -> Iterator[tuple[str, Any]]:
    """Kernels and configurations that can serve `problem`, the default first."""
    from tnp.ops.attention.kernels import KERNELS

    for (operation, name), kernel in KERNELS.items():
        if operation == problem.operation and kernel.unsupported(problem) is None:
            yield from ((name, config) for config in kernel.configs(problem))


def config_of(entry: Entry, problem: "Problem") -> Any:
    """The entry's configuration, or None where it is no candidate of its kernel for `problem`."""
    for kernel, config in candidates(problem):
        if kernel == entry["kernel"] and asdict(config) == entry["config"]:
            return config
    return None


def key_of(problem: "Problem") -> Entry:
    """`KEY` of `problem`."""
    return {
        "operation": problem.operation,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "head_dim": problem.head_dim,
        "capability": problem.capability,
        "batch_heads": _bucket(problem.batch * problem.n_heads),
        "n_q": _bucket(problem.n_q),
        "n_k": _bucket(problem.n_k),
    }


def entry_of(winner: dict[str, Any]) -> Entry:
    """The entry that a row of view `tuning` makes."""
    import torch

    from tnp.ops.attention.kernels import Problem

    sizes = (winner[name] for name in ("batch", "n_heads", "n_q", "n_k", "head_dim", "capability"))
    problem = Problem(winner["operation"], getattr(torch, winner["dtype"]), *sizes)
    config = json.loads(winner["launch_config"])
    return key_of(problem) | {"kernel": winner["kernel"], "config": config}


def problem_of(entry: Entry) -> "Problem":
    """The largest problem of the entry's bucket, of 8 heads where there are as many."""
    import torch

    from tnp.ops.attention.kernels import Problem

    n_heads = min(8, entry["batch_heads"])
    return Problem(
        entry["operation"],
        getattr(torch, entry["dtype"]),
        entry["batch_heads"] // n_heads,
        n_heads,
        entry["n_q"],
        entry["n_k"],
        entry["head_dim"],
        entry["capability"],
    )


def _bucket(n: int) -> int:
    return 1 << (n - 1).bit_length()
