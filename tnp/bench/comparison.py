"""Times implementations of an operator at one problem, in turn, in a process of their own.

    from tnp.bench import compare

    found = compare("rms_norm", rows=16384, width=768)
    found.winner  # "fused"
    found.rows    # a row of table "ops" for each implementation and pass

`python -m tnp.bench` prints the same as a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tnp.bench import asked
from tnp.bench.policy import TIMEOUT_S, Policy
from tnp.dispatch.registry import catalog, is_automatic
from tnp.dispatch.spec import PASSES, Call, Case, Operator, Problem, Value
from tnp.util.checks import require_count, require_real

# Two results are close if no element differs by more: torch.allclose with this atol, and rtol 0.
CLOSE = 2e-2


@dataclass(frozen=True)
class Comparison:
    """Holds the times of implementations at one problem.

    `rows` are those of table "ops", one for each implementation and pass, failures included. A
    timed row also has `difference`: the largest absolute difference between an element of its
    results and PyTorch's, or None if they were not compared. It is NaN if either has NaN. If the
    comparison failed, `reason` says why.
    """

    problem: Problem
    device: str  # the GPU's name in rows, or "cpu"
    names: tuple[str, ...]
    passes: tuple[str, ...]
    rows: list[dict[str, Any]]

    @property
    def times_ms(self) -> dict[str, float]:
        """Returns the median milliseconds of all passes, for implementations with all timed."""
        found = {}
        for name in self.names:
            own = [row for row in self.rows if row["implementation"] == name]
            if own and all(row["status"] == "ok" for row in own):
                found[name] = sum(row["time_ms_p50"] for row in own)
        return found

    @property
    def winner(self) -> str | None:
        """Returns the implementation with the shortest time of all passes, or None.

        An implementation whose `difference` is NaN is left out. One whose results are not close is
        not left out: `difference` and `max_abs_error` say how far off they are.
        """
        differences = ((row["implementation"], row.get("difference")) for row in self.rows)
        wrong = {name for name, value in differences if value is not None and math.isnan(value)}
        times = {name: ms for name, ms in self.times_ms.items() if name not in wrong}
        return min(times, key=times.__getitem__, default=None)


def compare(
    op: str,
    /,
    *,
    dtype: str | None = None,
    implementations: str | Iterable[str] | None = None,
    passes: str | Iterable[str] = "forward",
    iters: int | None = None,
    warmup_s: float | None = None,
    **sizes: Value,
) -> Comparison:
    """Times implementations of an operator, on the first visible GPU or the CPU.

    Args:
        op: the operator's name.
        dtype: of the activations: "bfloat16", "float16" or "float32"; None is bfloat16.
        implementations: one name or several: an implementation's own, "torch", "own" or "auto".
            None is every one that is known.
        passes: "forward", "backward", or both in a list.
        iters: the number of samples of each; None samples until means are precise.
        warmup_s: seconds to warm up at least; None is the default of `Policy`.
        sizes: the operator's sizes, at least 1, and options by name; True for an optional tensor
            that is given.

    Raises:
        ValueError: a name, size or number is not allowed.
        DeviceMissing: PyTorch cannot use the GPU that is here.
    """
    operator = catalog().operator(op)
    names = resolved(operator, implementations)
    passes = _each("passes", passes)
    require_passes(operator, passes)
    timing = policy(iters, warmup_s)
    return compare_at(operator, asked.problem(operator, dtype, sizes), names, passes, timing)


def _each(argument: str, given: str | Iterable[str]) -> tuple[str, ...]:
    """Returns the names given, each once. Raises ValueError if there is none."""
    one = isinstance(given, str) or not isinstance(given, Iterable)
    names = tuple(dict.fromkeys([given] if one else given))
    if not names:
        raise ValueError(f"{argument} is empty: name at least one")
    return names


def resolved(operator: Operator, names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Returns implementations: what "torch" and "own" stand for in their place, all for None.

    Raises ValueError for an unknown one, and for none at all.
    """
    if names is None:
        return tuple(catalog().names(operator.name))
    return tuple(dict.fromkeys(
        name if is_automatic(name) else catalog().listed(operator.name, name).name
        for name in _each("implementations", names)
    ))  # fmt: skip


def require_passes(operator: Operator, passes: Sequence[str]) -> None:
    """Raises ValueError unless the operator has these passes."""
    for pass_ in passes:
        if pass_ not in PASSES:
            raise ValueError(f"passes is {pass_!r}: choose from {' and '.join(PASSES)}")
    if "backward" in passes and not operator.differentiated:
        raise ValueError(f"{operator.name} has no backward pass")


def policy(iters: int | None = None, warmup_s: float | None = None) -> Policy:
    """Returns how to time: `iters` samples of each, after at least `warmup_s` seconds.

    Raises ValueError for other numbers.
    """
    changes: dict[str, Any] = {}
    if warmup_s is not None:
        changes["warmup_s"] = require_real("warmup_s", warmup_s)
        if not 0.0 <= changes["warmup_s"] < math.inf:
            raise ValueError(
                f"warmup_s is {warmup_s!r}: it must be a number of seconds, at least 0"
            )
    if iters is not None:
        iters = require_count("iters", iters, at_least=1)
        changes |= {"min_samples": iters, "half_width": math.inf, "long_samples": iters}
    return Policy(**changes)


def compare_at(
    operator: Operator,
    problem: Problem,
    names: Sequence[str],
    passes: Sequence[str],
    timing: Policy,
) -> Comparison:
    """Times implementations whose names `resolved` returned; see `compare`."""
    from tnp.bench.isolate import run_isolated
    from tnp.bench.outcome import failure_rows, only, op_job
    from tnp.bench.process import device_lock
    from tnp.bench.provenance import device_slug

    slug = device_slug()
    device = "cpu" if slug == "cpu" else "cuda"
    job = op_job(
        problem, names, problem.op, {}, device=device, device_slug=slug, replicate=0,
        timing=asdict(timing), passes=list(passes), shape="asked",
    )  # fmt: skip
    if device == "cpu" and (reasons := _refused(operator, problem, names, passes)):
        rows = []
        for name, reason in reasons.items():
            rows += failure_rows("op", only(job, [name]), "unsupported", reason)["ops"]
    else:
        with device_lock(slug):
            rows = run_isolated("op", job, TIMEOUT_S)["ops"]
            _compare_results(job, rows)
    return Comparison(problem, slug, tuple(names), tuple(passes), rows)


def _compare_results(job: dict, rows: list[dict[str, Any]]) -> None:
    """Adds `difference` to timed rows, and to `reason` why a comparison failed."""
    from tnp.bench.outcome import only
    from tnp.bench.process import run_child

    not_timed = {row["implementation"] for row in rows if row["status"] != "ok"}
    whole = [name for name in job["implementations"] if rows and name not in not_timed]
    report: dict = {"compared": []}
    if whole:
        report = run_child(["tnp.bench.child", "closeness"], only(job, whole), TIMEOUT_S)
    found = {(row["implementation"], row["pass"]): row for row in report.get("compared", [])}
    failed = None if "compared" in report else report["failure"][1]
    for row in rows:
        if row["status"] != "ok":
            continue
        compared = found.get((row["implementation"], row["pass"]), {})
        row["difference"] = compared.get("difference")
        if said := compared.get("reason", failed):
            said = f"not compared with PyTorch's: {said}"
            row["reason"] = "; ".join(filter(None, (row["reason"], said)))


def _refused(
    operator: Operator, problem: Problem, names: Sequence[str], passes: Sequence[str]
) -> dict[str, str]:
    """Returns why each implementation cannot run on this CPU; {} if any of them might."""
    from tnp.dispatch import devices
    from tnp.dispatch.selection import refuses
    from tnp.gates.results import wanted_of

    found = {}
    for name in names:
        own = None if is_automatic(name) else catalog().listed(operator.name, name).own
        if own is None:
            return {}
        wanted = wanted_of(operator, own, Case(problem)) if "backward" in passes else ()
        reason = refuses(own, Call(problem, devices.here_without_gpu(), wanted))
        if reason is None:
            return {}
        found[name] = reason
    return found
