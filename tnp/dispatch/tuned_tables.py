"""Chooses implementations and kernels by the tuned table of the GPU model.

`tables/<gpu>.json` has one entry a line, {"of", "mode", "problem", "choice", "config"}. For an
operator the choice is an implementation; for an operation it is a kernel with its configuration. An
entry with "us" holds costs that serve all sizes: microseconds for each of a kernel's
`Kernel.counts`, whose sum predicts its time (`tnp.tuning.fit_costs`).

`choose` takes the problem's own entry, else the shortest predicted time, else the default. If this
GPU's table has no entry for an operator or operation, the table of another GPU of the same compute
capability is used; `Choice.source` then names that GPU.

A user's own table lies in the user's cache and comes before the committed one. The environment
variable TNP_TABLES names one folder that replaces both.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import lru_cache
from operator import attrgetter, mul
from pathlib import Path
from typing import Any

from tnp.dispatch.devices import Target
from tnp.dispatch.spec import Call, Operator, Problem, Reason
from tnp.util.atomic_files import replacing, user_cache
from tnp.util.bounded import MOST

VERSION = 2
COMMITTED = Path(__file__).parent / "tables"
VARIABLE = "TNP_TABLES"
# Compute capabilities on which our implementations are the default. Some kernels need more shared
# memory than the 99 KB that a block has on 8.6, 8.9 and 12.0.
OURS_ON = (90, 100)
# An implementation declared earlier, PyTorch's first, stays if it takes at most this share of the
# fastest time: two runs differ by as much.
STAYS_BELOW = 1.01
TUNED = "tuned"  # the source of a choice by the problem's own entry
PREDICTED = "predicted"
EVERY_MODE = ""  # the mode of an entry that serves training and inference

Entry = dict[str, Any]
Offer = tuple[str, object, Reason]  # name, configuration, why it cannot run here
Counts = Callable[[str, object], tuple[float, ...] | None]  # called with a kernel's name and config
log = logging.getLogger("tnp.auto")


@dataclass(frozen=True)
class Choice:
    """Says what serves a call, and why.

    `source` is "named", "tuned", "predicted", "forced" or "default". With the table of another GPU
    it is "tuned on <model>" or "predicted on <model>". `refused` is the first reason why something
    ranked before it cannot run, or "".
    """

    name: str
    config: object = None
    source: str = "default"
    refused: str = ""

    def describe(self) -> dict[str, Any]:
        """Returns the choice as rows hold it."""
        content: dict[str, Any] = {"choice": self.name, "source": self.source}
        if self.config is not None:
            content["config"] = as_json(self.config)
        return content | ({"refused": self.refused} if self.refused else {})


def as_json(config: object) -> object:
    """Returns a configuration as tables and rows hold it."""
    return asdict(config) if is_dataclass(config) else config


def choose(
    of: str,
    operator: Operator,
    call: Call,
    offers: Sequence[Offer],
    known: Collection[str],
    counts: Counts = lambda name, config: None,
) -> Choice:
    """Returns the choice by the problem's own entry, else by predicted time, else the first offer
    that can run.

    Args:
        of: the operator's name, or an operation's.
        operator: the operator that the problem belongs to.
        call: the call to serve.
        offers: candidates, the default first.
        known: all names that an entry may have, also names that are not offered for this call.
        counts: returns `Kernel.counts` of an offer, or None if no time can be predicted.

    Raises:
        RuntimeError: no offer can run; the sentence gives the first reason.
    """
    refused = ""
    by_key: dict[str, Offer] = {}
    for offer in offers:
        by_key.setdefault(_key(offer[0], as_json(offer[1])), offer)
    for key, source in _ranked(of, operator, call, by_key, known, counts):
        if key not in by_key:
            continue
        name, config, reason = by_key[key]
        if reason is None:
            return Choice(name, config, source, refused)
        refused = refused or f"{name} cannot run here: {reason}"
    raise RuntimeError(f"nothing serves {call.problem} as {of}: {refused}")


def _ranked(
    of: str,
    operator: Operator,
    call: Call,
    offers: Mapping[str, Offer],
    known: Collection[str],
    counts: Counts,
) -> Iterator[tuple[str, str]]:
    """Yields (key of an offer, source of the choice), the best first."""
    for entry in _own(of, operator, call):
        if entry["gpu"] == call.target.model:
            _warn_if_gone(entry, offers.values(), known)
        yield _key(entry["choice"], entry.get("config")), TUNED + _whose(entry, call.target)
    yield from _predicted(of, operator, call, offers, counts)
    yield from ((key, "default") for key in offers)


def _own(of: str, operator: Operator, call: Call) -> Iterator[Entry]:
    """Yields the entries of the problem, then the entries with only its `Operator.fixed` options.

    An entry for the call's mode comes before one for every mode.
    """
    problem = call.problem
    kept = tuple(pair for pair in problem.options if pair[0] in operator.fixed)
    for text in dict.fromkeys((problem.json, replace(problem, options=kept).json)):
        for mode in (call.mode, EVERY_MODE):
            yield from _find(call.target, of, mode, text)


def _predicted(
    of: str, operator: Operator, call: Call, offers: Mapping[str, Offer], counts: Counts
) -> list[tuple[str, str]]:
    """Returns (key, source) of the offers that can run and have costs, the fastest first."""
    over = _canonical(_of_costs(operator, call.problem))
    times: dict[str, float] = {}
    source = PREDICTED
    for entry in _find(call.target, of, EVERY_MODE, over):
        key = _key(entry["choice"], entry["config"])
        name, config, reason = offers.get(key, ("", None, "not offered"))
        made_of = counts(name, config) if reason is None and key not in times else None
        if made_of is None:
            continue
        if len(made_of) != len(entry["us"]):
            _warn_once("a kernel counts other things than the table has costs of", entry)
            continue
        times[key] = sum(map(mul, made_of, entry["us"]))  # a user's own costs come first
        source = PREDICTED + _whose(entry, call.target)
    return [(key, source) for key in sorted(times, key=times.__getitem__)]


def _key(choice: str, config: object) -> str:
    return f"{choice} {json.dumps(config, sort_keys=True)}"


def _whose(entry: Entry, target: Target) -> str:
    """Returns " on <model>" if the entry is another GPU's, else ""."""
    return "" if entry["gpu"] == target.model else f" on {entry['gpu']}"


def _warn_if_gone(entry: Entry, offers: Collection[Offer], known: Collection[str]) -> None:
    """Logs one warning if the kernel or configuration of an entry no longer exists."""
    # A refused offer does not say which configurations it has.
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


# ------------------------------------------------------------------------------------- the tables

epoch = 0  # grows when tables are forgotten; part of every plan's key
_lock = threading.Lock()


def refresh() -> None:
    """Forgets the tables. The next choice reads them again."""
    global epoch
    with _lock:
        for cached in (table, _of_model, _index):
            cached.cache_clear()
        epoch += 1


def folders() -> list[Path]:
    """Returns the folders of tables in the order of their precedence."""
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
    """Returns a GPU's entries, the user's own first, then entries of another GPU for what is
    missing.

    The other GPU has the same compute capability.
    """
    if target.kind != "cuda":  # nobody tunes for Triton's interpreter
        return ()
    return _of_model(target.model, target.capability, *folders())


def _find(target: Target, of: str, mode: str, problem: str) -> Sequence[Entry]:
    """Returns the entries for a problem's JSON, the user's own first."""
    if target.kind != "cuda":
        return ()
    return _index(target.model, target.capability, *folders()).get((of, mode, problem), ())


@lru_cache(MOST)
def _index(model: str, capability: int, *folders: Path) -> dict[tuple[str, str, str], list[Entry]]:
    found: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in _of_model(model, capability, *folders):
        key = entry["of"], entry["mode"], _canonical(entry["problem"])
        found.setdefault(key, []).append(entry)
    return found


@lru_cache(MOST)
def _of_model(model: str, capability: int, *folders: Path) -> tuple[Entry, ...]:
    own = [entry for folder in folders for entry in table(folder / f"{model}.json")]
    named = {entry["of"] for entry in own}
    others = _of_another(model, capability, folders)
    return (*own, *(entry for entry in others if entry["of"] not in named))


def _of_another(model: str, capability: int, folders: Iterable[Path]) -> Sequence[Entry]:
    """Returns the first table of another GPU model of the same compute capability."""
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            entries = table(path)
            if path.stem != model and entries and entries[0]["capability"] == capability:
                return entries
    return ()


@lru_cache(MOST)
def table(path: Path) -> tuple[Entry, ...]:
    """Returns the entries of a file, each with its GPU model and compute capability.

    Returns none, and logs a warning, if the file is cut short or has another version.
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
        raise ValueError(f"it has version {content['version']}")
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
    """Returns the entry that gives a problem an implementation, or a kernel with its config."""
    found = {"of": of, "mode": EVERY_MODE, "problem": json.loads(problem.json), "choice": chosen}
    return found if config is None else found | {"config": as_json(config)}


def cost_entry(
    of: str, operator: Operator, problem: Problem, chosen: str, config: object, us: list[float]
) -> Entry:
    """Returns the entry that gives µs for each of the counts of an operation's kernel."""
    found = {"of": of, "mode": EVERY_MODE, "problem": _of_costs(operator, problem)}
    return found | {"choice": chosen, "config": as_json(config), "us": us}


def _of_costs(operator: Operator, problem: Problem) -> dict[str, Any]:
    """Returns the part of a problem that costs depend on; dtypes of one size share their rate."""
    fixed = {name: problem[name] for name in operator.fixed if name in operator.sizes}
    return {"op": operator.name, "itemsize": problem.itemsize, "sizes": fixed}


def _canonical(content: object) -> str:
    """Returns the JSON of an entry's problem in the form of `Problem.json`."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def write(target: Target, entries: Iterable[Entry], folder: Path | None = None) -> Path:
    """Adds entries to a GPU's table and returns its path. They replace entries for the same.

    The file is written whole or not at all, because a job may be reading it. `folder` is the first
    of `folders` if None.
    """
    path = (folder or folders()[0]) / f"{target.model}.json"
    names = ("of", "mode", "problem", "choice", "config", "us")
    by_key = {}
    for entry in (*table(path), *entries):
        # Each configuration has its own costs; otherwise the choice is replaced.
        about = names[: 5 if "us" in entry else 3]
        key = _canonical([entry[name] for name in about])
        by_key[key] = {name: entry[name] for name in names if name in entry}
    lines = ",\n".join(json.dumps(by_key[key]) for key in sorted(by_key))
    head = f'"version": {VERSION}, "capability": {target.capability}'
    with replacing(path) as new:
        new.write_text(f'{{{head}, "entries": [\n{lines}\n]}}\n')
    refresh()
    return path


def operations(operator: Operator) -> dict[str, tuple[str, str]]:
    """Returns {operation: (the first of ours that "auto" may take, its pass)}: these are tuned."""
    found: dict[str, tuple[str, str]] = {}
    for own in filter(attrgetter("selectable"), operator.implementations):
        for pass_, operation in (("forward", own.forward), ("backward", own.backward)):
            if operation is not None:
                found.setdefault(operation.name, (own.name, pass_))
    return found
