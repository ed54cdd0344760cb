"""Finds operators and implementations: in packages of `tnp.ops`, and by entry points.

Another distribution's implementation is listed by its entry point, `operator.implementation` in
group `tnp.implementations`, and by the distribution's metadata. Its module is imported only to
gate, time or run it. An extra of the distribution with the implementation's name lists the packages
that it needs; their versions stand in its rows. Group `tnp.operators` brings whole operators: their
modules are imported here, and must not import torch.

A distribution of this project names its package in group `tnp.sources`. Its implementations count
as ours: they are imported here, and rows name no package for them.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import metadata

from tnp.dispatch.spec import OWN, Implementation, Operator

IMPLEMENTATIONS, OPERATORS, SOURCES = "tnp.implementations", "tnp.operators", "tnp.sources"
# its packages are imported by name, because `ops` may import `dispatch` and not the reverse
OWN_PACKAGE = "tnp.ops"
AUTO = "auto"  # stands for whatever the tuned table says
# The operator that replaces a block's layers in a model, and the families of those layers.
BLOCK, LAYERS = "transformer_block", ("rms_norm", "projection", "attention", "mlp")
TORCH = "torch"  # every operator takes it for PyTorch's plain form, and "own" for the best of ours


@dataclass(frozen=True)
class Listed:
    """Describes an implementation for planning, without importing anything for it."""

    op: str
    name: str
    rank: int  # its place among the operator's implementations; 0 is PyTorch's plain form
    own: Implementation | None = None  # from the operator's declaration
    entry: metadata.EntryPoint | None = None
    brought_by: str | None = None  # the distribution that brings the operator, if it is not ours

    @cached_property
    def packages(self) -> dict[str, str | None]:
        """Returns the distributions whose versions its rows hold; None if not installed."""
        if self.entry is None:
            return {self.brought_by: version(self.brought_by)} if self.brought_by else {}
        return {name: version(name) for name in (*_required(self.entry), self.entry.dist.name)}

    @property
    def provider(self) -> str:
        """Returns "own", "torch", or the first package that it needs."""
        return self.own.provider if self.own else next(iter(self.packages))

    @property
    def missing(self) -> str | None:
        """Returns the sentence that names a package that is not installed, or None."""
        absent = [name for name, version in self.packages.items() if version is None]
        return f"package {absent[0]} is not installed: pip install {absent[0]}" if absent else None

    @cached_property
    def implementation(self) -> Implementation:
        """Returns the implementation. Another distribution's is imported now.

        Raises RuntimeError for a missing package, ValueError for an entry point of another type or
        name, and any error of the import.
        """
        if self.own is not None:
            return self.own
        if self.missing:
            raise RuntimeError(f"{self.op} implementation {self.name!r}: {self.missing}")
        return replace(_loaded(self.entry), provider=self.provider)


class Catalog:
    """Holds all operators and implementations, and `faults`: a sentence for each refused one."""

    def __init__(self) -> None:
        self.operators: dict[str, Operator] = {}
        self.faults: list[str] = []
        self._listed: dict[tuple[str, str], Listed] = {}
        for operator in _own_operators():
            self._add(operator)
        for entry in metadata.entry_points(group=OPERATORS):
            self._add_foreign_operator(entry)
        self._add_foreign_implementations()

    def operator(self, op: str) -> Operator:
        """Returns the operator; ValueError names the known ones."""
        if op not in self.operators:
            raise ValueError(f"unknown operator {op!r}: choose from {', '.join(self.operators)}")
        return self.operators[op]

    def names(self, op: str) -> list[str]:
        """Returns the names of an operator's implementations, PyTorch's plain form first."""
        self.operator(op)
        return [name for of, name in self._listed if of == op]

    def ours(self, op: str) -> list[Implementation]:
        """Returns an operator's implementations that launch our kernels."""
        listed = (self._listed[op, name].own for name in self.names(op))
        return [own for own in listed if own is not None and own.forward is not None]

    def titles(self) -> dict[str, str]:
        """Returns the titles that operators and their implementations declare, by name."""
        declared = [*self.operators.values(), *(one.own for one in self._listed.values())]
        return {one.name: one.title for one in declared if one is not None and one.title}

    def installed(self, op: str) -> list[str]:
        """Returns the implementations from other packages, installed or not."""
        return [name for name in self.names(op) if self._listed[op, name].entry is not None]

    def real(self, op: str, name: str) -> str:
        """Returns the name that rows and logs use for an implementation.

        Every operator takes "torch" for PyTorch's plain form and "own" for the best of ours. Any
        other name comes back as it is. Raises ValueError for an unknown operator.
        """
        operator = self.operator(op)
        if (op, name) in self._listed:
            return name
        if name == TORCH:
            return operator.implementations[0].name
        if name == OWN:
            ours = [one for one in operator.implementations if one.provider == OWN]
            chosen = [one for one in ours if one.chosen_from] or ours
            return chosen[-1].name if chosen else name
        return name

    def listed(self, op: str, name: str) -> Listed:
        """Returns an implementation by any of its names; ValueError names the known ones."""
        found = self._listed.get((op, self.real(op, name)))
        if found is None:
            choices = ", ".join(dict.fromkeys([*self.names(op), TORCH, OWN, AUTO]))
            raise ValueError(f"unknown implementation {name!r} of {op}: choose from {choices}")
        return found

    def load(self, op: str, name: str) -> Implementation:
        """Returns the implementation. Raises what `listed` and `Listed.implementation` raise."""
        return self.listed(op, name).implementation

    def family(self, name: str) -> list[Operator]:
        """Returns the operators that a variant names together; ValueError if there is none."""
        found = [op for op in self.operators.values() if (op.family or op.name) == name]
        if not found:
            raise ValueError(f"no operator is of family {name!r}: is its name spelt right?")
        return found

    def role(self, op: str, name: str) -> str:
        """Returns an implementation's role in comparisons, one of `tnp.store.schemas.ROLES`."""
        if is_automatic(name):
            return OWN
        listed = self.listed(op, name)
        if listed.provider == OWN:
            return OWN
        return "baseline" if listed.rank == 0 else "peer"

    def candidates(self, op: str, name: str) -> list[str]:
        """Returns what may run under `name`: itself, or all that "auto" may choose from."""
        if not is_automatic(name):
            return [self.listed(op, name).name]
        listed = [self.listed(op, one) for one in self.names(op)]
        return [one.name for one in listed if one.own is None or one.own.chosen_from]

    def _add(self, operator: Operator, brought_by: str | None = None) -> None:
        self.operators[operator.name] = operator
        for rank, own in enumerate(operator.implementations):
            listed = Listed(operator.name, own.name, rank, own, brought_by=brought_by)
            self._listed[operator.name, own.name] = listed

    def _add_foreign_operator(self, entry: metadata.EntryPoint) -> None:
        had_torch = "torch" in sys.modules
        try:
            operator = entry.load()
            reason = self._refusal(operator)
        except (Exception, SystemExit) as error:  # an import may raise anything
            reason = f"{type(error).__name__}: {error}"
        if reason is None and "torch" in sys.modules and not had_torch:
            reason = (
                "its module imports torch, which planning must not wait for; import it inside "
                "functions"
            )
        if reason is not None:
            self.faults.append(f"operator {entry.name!r} of {entry.dist.name}: {reason}")
            return
        if _is_ours(entry):
            self._add(operator)
            return
        theirs = tuple(
            replace(one, provider=entry.dist.name) if one.provider == OWN else one
            for one in operator.implementations
        )
        self._add(replace(operator, implementations=theirs), entry.dist.name)

    def _refusal(self, operator: object) -> str | None:
        """Returns why another distribution's operator is refused, or None."""
        if not isinstance(operator, Operator):
            return "it is no Operator"
        if operator.name in self.operators:
            return f"there is an operator {operator.name!r} already"
        names = [one.name for one in operator.implementations]
        twice = next((name for name in names if names.count(name) > 1), None)
        return twice and f"two of its implementations are called {twice!r}"

    def _add_foreign_implementations(self) -> None:
        found: dict[tuple[str, str], list[metadata.EntryPoint]] = {}
        for entry in metadata.entry_points(group=IMPLEMENTATIONS):
            op, _, name = entry.name.partition(".")
            found.setdefault((op, name), []).append(entry)
        ours_first = sorted(found.items(), key=lambda one: (not _is_ours(one[1][0]), one[0]))
        for (op, name), entries in ours_first:
            who = " and ".join(sorted({entry.dist.name for entry in entries}))
            if op not in self.operators or not name.isidentifier() or name in (AUTO, OWN):
                self.faults.append(
                    f"entry point {op}.{name} of {who}: it must be operator.implementation, the "
                    f"operator one of {', '.join(self.operators)}"
                )
            elif (op, name) in self._listed:
                self.faults.append(f"{op}.{name} of {who}: tnp has an implementation of that name")
            elif len(entries) > 1:
                self.faults.append(f"{op}.{name} is registered by {who}: none of them is taken")
            else:
                self._add_foreign_implementation(op, name, entries[0])

    def _add_foreign_implementation(self, op: str, name: str, entry: metadata.EntryPoint) -> None:
        rank = len(self.names(op))
        if not _is_ours(entry):
            self._listed[op, name] = Listed(op, name, rank, entry=entry)
            return
        try:
            self._listed[op, name] = Listed(op, name, rank, _loaded(entry))
        except Exception as error:  # one fault must not stop the others
            self.faults.append(f"{op}.{name} of {entry.dist.name}: {error}")


@cache
def source_packages() -> dict[str, metadata.EntryPoint]:
    """Returns the packages of this project's other distributions, and the readers of their files.

    The entry point's class reads files in other languages than Python. It has `suffixes` of files,
    and takes a path. `tnp.experiment.code_hash` uses an instance like a Python module: it has
    `bound` names, `imported` names, and `read(name)` → (hash, [(module, name)] that it mentions).
    """
    return {entry.name: entry for entry in metadata.entry_points(group=SOURCES)}


def _loaded(entry: metadata.EntryPoint) -> Implementation:
    """Imports an implementation. Raises ValueError if the entry point's name does not fit it."""
    found = entry.load()
    if not isinstance(found, Implementation):
        kind = type(found).__name__
        raise ValueError(f"{entry.value} is of type {kind}: it must be an Implementation")
    if found.name != entry.name.partition(".")[2]:
        raise ValueError(
            f"entry point {entry.name!r} names an implementation called {found.name!r}"
        )
    return found


def _is_ours(entry: metadata.EntryPoint) -> bool:
    return entry.module.split(".")[0] in source_packages()


def is_automatic(name: str) -> bool:
    """Returns whether a name leaves the choice to the table: "auto", or "auto:e4m3"."""
    return name.partition(":")[0] == AUTO


def block_of(implementations: Mapping[str, str]) -> dict[str, str]:
    """Returns {"transformer_block": "fused"} if all layers of a block are ours, else {}.

    Args:
        implementations: family of operators → implementation, as a variant names them.
    """
    if any(family not in implementations for family in LAYERS):
        return {}
    named = [(op.name, implementations[family])
             for family in LAYERS for op in catalog().family(family)]  # fmt: skip
    ours = all(catalog().role(op, name) == OWN for op, name in named)
    return {BLOCK: "fused"} if ours else {}


@cache
def catalog() -> Catalog:
    """Returns this process's catalog, which is made once."""
    return Catalog()


def _own_operators() -> list[Operator]:
    """Returns what the packages of `OWN_PACKAGE` declare, as OPERATOR or as several OPERATORS."""
    found = []
    paths = importlib.import_module(OWN_PACKAGE).__path__
    for module in pkgutil.iter_modules(paths, f"{OWN_PACKAGE}."):
        if module.ispkg:
            package = importlib.import_module(module.name)
            found += getattr(package, "OPERATORS", None) or [getattr(package, "OPERATOR", None)]
    return [operator for operator in found if operator is not None]


def version(name: str) -> str | None:
    """Returns the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _required(entry: metadata.EntryPoint) -> list[str]:
    """Returns the packages of the extra with the implementation's name, as tnp-peers[fa3]."""
    wanted = entry.name.partition(".")[2].replace("_", "-").lower()
    names = []
    for line in entry.dist.requires or ():
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if extra and extra[1].replace("_", "-").lower() == wanted:
            names.append(re.match(r"[A-Za-z0-9._-]+", requirement.strip())[0])
    return names
