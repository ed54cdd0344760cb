"""Makes entries of tuned tables from rows of table "ops": the fastest that took turns.

An earlier candidate stays if it takes at most `tuned_tables.STAYS_BELOW` times the fastest's time.
The first candidate is the default.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping
from statistics import median
from typing import Any, TypeVar

from tnp.dispatch import tuned_tables
from tnp.dispatch.registry import AUTO, catalog
from tnp.dispatch.spec import Operator

Row = Mapping[str, Any]
Key = TypeVar("Key", bound=Hashable)

TRAINING, INFERENCE = "training", "inference"


def of_operations(rows: Iterable[Row]) -> list[tuned_tables.Entry]:
    """Returns an entry for each operation and problem with a timed trial.

    An entry has a kernel and a configuration, and serves both modes. Other rows are ignored.

    Args:
        rows: rows of table "ops". The rows of one job are in the order of its contenders.
    """
    found: dict[tuple[str, str], dict[tuple[str, str], list[float]]] = {}
    for row in rows:
        forced = json.loads(row.get("forced") or "{}")
        implementation = catalog().listed(row["op"], row["implementation"]).own if forced else None
        if implementation is None or row["status"] != "ok":
            continue
        of = getattr(implementation, row["pass"]).name
        if of in forced:
            kernel, config = forced[of]
            times = found.setdefault((of, row["problem"]), {})
            times.setdefault((kernel, json.dumps(config)), []).append(row["time_ms_p50"])
    entries = []
    for (of, text), times in found.items():
        kernel, config = fastest({one: median(own) for one, own in times.items()})
        problem = catalog().operator(json.loads(text)["op"]).from_json(text)
        entries.append(tuned_tables.entry(of, problem, kernel, json.loads(config)))
    return entries


def of_operators(rows: Iterable[Row]) -> list[tuned_tables.Entry]:
    """Returns an entry for each operator, problem and mode: the fastest that "auto" may take.

    Training counts the forward and the backward pass, or only the backward pass if its time holds
    the forward's. Trials and twins are ignored.
    """
    found: dict[tuple[str, str], dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        if row["status"] == "ok" and row.get("problem") and not (row["forced"] or row["twin"]):
            passes = found.setdefault((row["op"], row["problem"]), {})
            times = passes.setdefault(row["implementation"], {})
            times.setdefault(row["pass"], []).append(row["time_ms_p50"])
    entries = []
    for (op, text), by_name in found.items():
        operator = catalog().operator(op)
        problem = operator.from_json(text)
        medians = {
            name: {pass_: median(times) for pass_, times in by_name[name].items()}
            for name in catalog().candidates(op, AUTO)
            if name in by_name
        }
        for mode in (TRAINING, INFERENCE) if operator.differentiated else (INFERENCE,):
            whole = {name: time_ms(operator, times, mode) for name, times in medians.items()}
            timed = {name: time for name, time in whole.items() if time is not None}
            if timed:
                entries.append(tuned_tables.entry(op, problem, fastest(timed)) | {"mode": mode})
    return entries


def time_ms(operator: Operator, times: Mapping[str, float], mode: str) -> float | None:
    """Returns an implementation's time in a mode, or None if a pass was not timed."""
    needed = ["forward"]
    if mode == TRAINING:
        needed = ["backward"] if operator.backward_with_forward else ["forward", "backward"]
    return sum(times[pass_] for pass_ in needed) if set(needed) <= times.keys() else None


def fastest(times: Mapping[Key, float]) -> Key:
    """Returns the first key whose time is at most `STAYS_BELOW` times the shortest."""
    least = min(times.values())
    return next(one for one, time in times.items() if time <= tuned_tables.STAYS_BELOW * least)
