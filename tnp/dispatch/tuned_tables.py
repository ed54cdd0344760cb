"""What runs where nobody named it: the tuned tables, one a GPU model.

`tuned/<gpu>.json` holds one entry a line, {"of", "mode", "problem", "choice", "config"}. Of an
operator the choice is an implementation; of an operation it is a kernel with its configuration. An
entry with "us" says what a kernel costs at all sizes: so many microseconds for each of its
`Kernel.counts`, whose sum predicts its time (`tnp.tuning.fit_costs`).

A problem takes the entry of its own or of what costs the same, else what is predicted to be the
fastest, else the entry of the nearest problem whose choice can serve it. Where a GPU model's table
says nothing of an operator or operation, that of another model of the same compute capability does,
and the choice says whose. What a user tuned lies in the user's cache and comes before what is
committed; the environment variable TNP_TABLES names one folder that takes the place of both.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from operator import attrgetter, mul
from pathlib import Path
from typing import Any

from tnp.dispatch.devices import Target
from tnp.dispatch.spec import Call, Operator, Problem, Reason
from tnp.util.atomic_files import replacing, user_cache
from tnp.util.bounded import MOST, Bounded

VERSION = 2
COMMITTED = Path(__file__).parent / "tables"
VARIABLE = "TNP_TABLES"
# Compute capabilities at which ours run where nothing was measured. Some kernels need more shared
# memory than the 99 KB that a block has on 8.6, 8.9 and 12.0.
OURS_ON = (90, 100)
# An implementation declared earlier, PyTorch's first, stays where it takes at most this much of the
# fastest's time: two runs differ by as much.
STAYS_BELOW = 1.01
TUNED = "tuned"  # the source of a choice that the problem's own entry made
PREDICTED = "predicted"
EVERY_MODE = ""  # of an entry that serves training and inference

Entry = dict[str, Any]
Offer = tuple[str, object, Reason]  # name, configuration, why not
Counts = Callable[[str, object], tuple[float, ...] | None]  # of a kernel and its configuration
log = logging.getLogger("tnp.auto")


@dataclass(frozen=True)
class Choice:
    """`source` is "named", "tuned", "predicted", "nearest", "forced" or "default".

    With the table of a relative it is "tuned on <another model>" or "predicted on <another model>".

    `refused` says why what would have come first cannot run; "" where it can.
    """

    name: str
    config: object = None
    source: str = "default"
    refused: str = ""

    def describe(self) -> dict[str, Any]:
        """As it stands in rows."""
        content: dict[str, Any] = {"choice": self.name, "source": self.source}
        if self.config is not None:
            content["config"] = as_json(self.config)
        return content | ({"refused": self.refused} if self.refused else {})


def as_json(config: object) -> object:
    """A configuration as tables and rows hold it."""
    return asdict(config) if is_dataclass(config) else config


def choose(
    of: str,
    operator: Operator,
    call: Call,
    offers: Sequence[Offer],
    known: Collection[str],
    counts: Counts = lambda name, config: None,
) -> Choice:
    """Of the problem's own entry, predicted, or of the nearest entry; else the first that can run.

    Args:
        of: the operator's name, or an operation's.
        operator: whose problems are compared.
        call: what is to be served.
        offers: candidates in the order to be tried where no table says anything.
        known: names that entries may have, those that are not on offer for this call too.
        counts: what the time of an offer is made of; None where that is not known.

    Raises:
        RuntimeError: none of them can run, with the first reason.
    """
    refused = ""
    entries = [entry for entry in of_target(call.target) if entry["of"] == of]
    own, others = _ranked(entries, operator, call)
    for entry, source in (*own, *_predicted(entries, operator, call, offers, counts), *others):
        if source == TUNED:
            _warn_if_gone(entry, offers, known)
        for name, config, reason in offers:
            if name != entry["choice"] or as_json(config) != entry.get("config"):
                continue
            if reason is None:
                return Choice(name, config, source, refused)
            refused = refused or f"{name} cannot run here: {reason}"
    for name, config, reason in offers:
        if reason is None:
            return Choice(name, config, "default", refused)
        refused = refused or f"{name} cannot run here: {reason}"
    raise RuntimeError(f"nothing serves {call.problem} as {of}: {refused}")


def _warn_if_gone(entry: Entry, offers: Sequence[Offer], known: Collection[str]) -> None:
    """Says once of a problem's own entry that its kernel or configuration is there no more."""
    # What cannot run here does not say which configurations it has.
    of_its_name = [
        reason is not None or as_json(config) == entry.get("config")
        for name, config, reason in offers
        if name == entry["choice"]
    ]
    if entry["choice"] not in known or (of_its_name and not any(of_its_name)):
        _warn_once("a tuned entry names what is there no more", entry)


def _warn_once(what: str, entry: Entry) -> None:
    text = json.dumps({name: entry.get(name) for name in ("of", "problem", "choice", "config")})
    _warn_of(what, text)


@lru_cache(MOST)
def _warn_of(what: str, entry: str) -> None:
    log.warning("%s and is passed over: %s", what, entry)


Sourced = list[tuple[Entry, str]]  # entries, each with the source of a choice by it


def _predicted(
    entries: Sequence[Entry],
    operator: Operator,
    call: Call,
    offers: Sequence[Offer],
    counts: Counts,
) -> Sourced:
    """What can run and has its costs in the table, the one of the shortest predicted time first."""
    over = _of_costs(operator, call.problem)
    costs = [entry for entry in entries if "us" in entry and entry["problem"] == over]
    usable = {_name(name, as_json(config)): (name, config)
              for name, config, reason in offers if costs and reason is None}  # fmt: skip
    times: dict[str, tuple[float, Entry]] = {}
    for entry in costs:
        offered = _name(entry["choice"], entry["config"])
        if offered not in usable:
            continue
        made_of = counts(*usable[offered])
        if made_of is None:
            continue
        if len(made_of) != len(entry["us"]):
            _warn_once("a kernel counts other things than the table has costs of", entry)
            continue
        time = sum(map(mul, made_of, entry["us"]))
        times.setdefault(offered, (time, entry))  # a user's own come first
    fastest_first = sorted(times.values(), key=lambda one: one[0])
    return [(entry, PREDICTED + _whose(entry, call.target)) for _, entry in fastest_first]


def _name(choice: str, config: object) -> str:
    return f"{choice} {json.dumps(config, sort_keys=True)}"


def _whose(entry: Entry, target: Target) -> str:
    """ " on <model>" where it is another GPU's, else ""."""
    return "" if entry["gpu"] == target.model else f" on {entry['gpu']}"


def _ranked(entries: Sequence[Entry], operator: Operator, call: Call) -> tuple[Sourced, Sourced]:
    """Entries that could serve: those at distance 0, of the problem's own sizes first; then the
    others, the nearest first.
    """
    found = []
    for entry in entries:
        if "us" in entry or entry["mode"] not in (EVERY_MODE, call.mode):
            continue
        theirs = _comparable(operator, call.problem, entry["problem"])
        if theirs is not None:
            distance = operator.distance(call.problem, theirs)
            other = len(call.problem.options) - len(theirs.options)
            elsewhere = theirs != call.problem
            whose = _whose(entry, call.target)
            source = TUNED + whose if whose or not elsewhere else "nearest"
            rank = other, distance, elsewhere, entry["mode"] == EVERY_MODE
            found.append((rank, (entry, source)))
    found.sort(key=lambda one: one[0])
    own, others = ([one for rank, one in found if (rank[1] > 0) == far] for far in (False, True))
    return own, others


def _comparable(operator: Operator, problem: Problem, content: dict) -> Problem | None:
    """An entry's problem where it says something about this one.

    One without an option that is on says something too, after those with it and before a default,
    unless the option is `Operator.fixed`.
    """
    key = operator.name, json.dumps(content)
    try:
        theirs = _problems[key]
    except KeyError:
        try:
            theirs = operator.from_json(key[1])
        except ValueError:  # the operator has changed since
            theirs = None
        with _lock:
            _problems[key] = theirs
    if theirs is None:
        return None
    same = theirs.dtype == problem.dtype and set(theirs.options) <= set(problem.options)
    fixed = all(theirs[name] == problem[name] for name in operator.fixed)
    return theirs if same and fixed else None


# ------------------------------------------------------------------------------------- the tables

_problems = Bounded()  # (operator, entry's JSON) → its Problem, or None; parsed once
epoch = 0  # of the tables in this process; part of every plan's key
_lock = threading.Lock()


def refresh() -> None:
    """Forgets the tables. The next choice reads them again."""
    global epoch
    with _lock:
        table.cache_clear()
        _of_model.cache_clear()
        _problems.clear()
        epoch += 1


def folders() -> list[Path]:
    """Where tables lie, what comes first first."""
    if os.environ.get(VARIABLE):
        folder = Path(os.environ[VARIABLE])
        if not folder.is_dir():
            _warn_of_no_folder(folder)
        return [folder]
    return [user_cache() / "tuned", COMMITTED]


@lru_cache(MOST)
def _warn_of_no_folder(folder: Path) -> None:
    log.warning("%s is %s, which is no folder: no tuned table is read", VARIABLE, folder)


def of_target(target: Target) -> Sequence[Entry]:
    """Entries for a GPU, a user's own first; what they say nothing of is taken from a relative."""
    if target.kind != "cuda":  # nobody tunes for Triton's interpreter
        return ()
    return _of_model(target.model, target.capability, *folders())


@lru_cache(MOST)
def _of_model(model: str, capability: int, *folders: Path) -> tuple[Entry, ...]:
    own = [entry for folder in folders for entry in table(folder / f"{model}.json")]
    named = {entry["of"] for entry in own}
    relatives = _of_relative(model, capability, folders)
    return (*own, *(entry for entry in relatives if entry["of"] not in named))


def _of_relative(model: str, capability: int, folders: Iterable[Path]) -> Sequence[Entry]:
    """Entries of the first table of another model of the same compute capability."""
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            entries = table(path)
            if path.stem != model and entries and entries[0]["capability"] == capability:
                return entries
    return ()


@lru_cache(MOST)
def table(path: Path) -> tuple[Entry, ...]:
    """Entries of a file, each with its GPU and that one's capability; none, with a warning, where
    it is cut short or of another version.
    """
    if not path.exists():
        return ()
    try:
        return _parsed(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning(
            "%s is no tuned table of version %d (%s: %s) and is passed over: restore it, "
            "or tune again", path, VERSION, type(error).__name__, error,
        )  # fmt: skip
        return ()


def _parsed(path: Path) -> tuple[Entry, ...]:
    content = json.loads(path.read_text())
    if content["version"] != VERSION:
        raise ValueError(f"it is of version {content['version']}")
    gpu = {"gpu": path.stem, "capability": int(content["capability"])}
    entries = tuple({"mode": EVERY_MODE} | gpu | entry for entry in content["entries"])
    for entry in entries:
        if not {"of", "problem", "choice"} <= entry.keys():
            raise ValueError(f"an entry lacks of, problem or choice: {json.dumps(entry)}")
        if "us" in entry and not ("config" in entry and _are_times(entry["us"])):
            raise ValueError(
                f"an entry of costs needs config and times in µs from 0 up: {json.dumps(entry)}"
            )
    return entries


def _are_times(us: object) -> bool:
    return isinstance(us, list) and all(
        type(one) in (int, float) and 0 <= one < math.inf for one in us
    )


def entry(of: str, problem: Problem, chosen: str, config: object = None) -> Entry:
    """What a table holds of an operator's implementation, or of an operation's kernel."""
    found = {"of": of, "mode": EVERY_MODE, "problem": json.loads(problem.json), "choice": chosen}
    return found if config is None else found | {"config": as_json(config)}


def cost_entry(
    of: str, operator: Operator, problem: Problem, chosen: str, config: object, us: list[float]
) -> Entry:
    """What a table holds of the costs of an operation's kernel: µs for each of its counts."""
    found = {"of": of, "mode": EVERY_MODE, "problem": _of_costs(operator, problem)}
    return found | {"choice": chosen, "config": as_json(config), "us": us}


def _of_costs(operator: Operator, problem: Problem) -> dict[str, Any]:
    """What all problems have in common that an entry of costs serves.

    Types of one size are served alike: their products run at one rate.
    """
    fixed = {name: problem[name] for name in operator.fixed if name in operator.sizes}
    return {"op": operator.name, "itemsize": problem.itemsize, "sizes": fixed}


def write(target: Target, entries: Iterable[Entry], folder: Path | None = None) -> Path:
    """Add entries to a GPU's table, in the place of those for the same; its path.

    Written whole or not at all: a job may be reading it. `folder` is the first of `folders` where
    none is given.
    """
    path = (folder or folders()[0]) / f"{target.model}.json"
    names = ("of", "mode", "problem", "choice", "config", "us")
    by_key = {}
    for entry in (*table(path), *entries):
        # Of costs there is an entry a configuration; else the choice is what is replaced.
        about = names[: 5 if "us" in entry else 3]
        key = json.dumps([entry[name] for name in about], sort_keys=True)
        by_key[key] = {name: entry[name] for name in names if name in entry}
    lines = ",\n".join(json.dumps(by_key[key]) for key in sorted(by_key))
    head = f'"version": {VERSION}, "capability": {target.capability}'
    with replacing(path) as new:
        new.write_text(f'{{{head}, "entries": [\n{lines}\n]}}\n')
    refresh()
    return path


def operations(operator: Operator) -> dict[str, tuple[str, str]]:
    """{operation: the first implementation of ours that runs it, and in which pass}

    Of implementations that "auto" may take: what stands for comparison is not tuned.
    """
    found: dict[str, tuple[str, str]] = {}
    for own in filter(attrgetter("selectable"), operator.implementations):
        for pass_, operation in (("forward", own.forward), ("backward", own.backward)):
            if operation is not None:
                found.setdefault(operation.name, (own.name, pass_))
    return found
