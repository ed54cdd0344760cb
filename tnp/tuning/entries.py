"""What is tuned, and entries of tuned tables from rows of table "ops": what was the fastest where
all took turns.

What stands earlier among the candidates, and the default is the first, stays where it takes at
most `choice.STAYS_BELOW` of the fastest's time.
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
    """An entry for each operation and problem of which a trial was timed: kernel, configuration.

    It serves both modes. Rows that are no trials say nothing here.

    Args:
        rows: of table "ops", those of one job in the order of its contenders.
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
    """For each operator and problem the fastest that "auto" may take: for training, for inference.

    Training is forward and backward, each timed; or the backward pass alone where its time holds
    the forward's. Trials and twins say nothing here.
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
    """Of an implementation in a mode, from its passes; None where one of them was not timed."""
    needed = ["forward"]
    if mode == TRAINING:
        needed = ["backward"] if operator.backward_with_forward else ["forward", "backward"]
    return sum(times[pass_] for pass_ in needed) if set(needed) <= times.keys() else None


def fastest(times: Mapping[Key, float]) -> Key:
    """The first whose time is the shortest, or as good as that."""
    least = min(times.values())
    return next(one for one, time in times.items() if time <= tuned_tables.STAYS_BELOW * least)
