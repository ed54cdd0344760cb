"""Computes hashes of the definitions that some code reaches, and of no others.

It starts from "module:name", with the top-level statements that define the name. It follows all
names that these mention: directly, through imports (also inside functions), and in strings that
name code ("module:NAME"). A definition's hash covers its syntax tree without comments, docstrings,
positions and the names of our modules. So a file may be moved, and the hash is the same on Python
3.11 to 3.13.

A module that is used as a value counts whole. A distribution of ours may bring a class that reads
files in another language (group `tnp.sources`); these files are named like modules. Operators'
declarations are not followed: the job says which implementation it runs
(`tnp.experiment.fingerprints`).
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tnp.dispatch.registry import source_packages

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tnp", "workflow")  # sources are followed here and in `source_packages`
# These modules lead a call to its kernel. Gates and eager steps depend on them, a device's time
# does not.
HOUSE = frozenset(
    (
        *("tnp.experiment.code_hash", "tnp.experiment.fingerprints"),
        *(
            f"tnp.dispatch.{module}"
            for module in (
                *("spec", "registry", "devices", "tuned_tables", "call", "selection", "plans"),
                *("custom_op", "launcher", "private"),
            )
        ),
    )
)
DECLARED = ("Operator", "OPERATORS")  # the class, and the name of a tuple of its instances
NAMED = re.compile(r"([A-Za-z_]\w*(?:\.\w+)+):([A-Za-z_]\w*)")
# Fields of a syntax tree that mean nothing, or differ between versions of Python.
IGNORED = frozenset(("ctx", "kind", "type_comment", "type_params", "type_ignores"))
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
EVERYTHING = "*"  # the name that stands for a whole module
LAMBDA = "<lambda>"  # a function without a name is called this, with its line

Symbol = tuple[str, str]  # module, name


def fingerprint(starts: Iterable[str], without: Iterable[str] = HOUSE) -> str:
    """Returns 16 hexadecimal digits for all that `starts`, each "module:name", reach.

    Modules in `without` are not followed. Raises ValueError for a start that does not exist.
    """
    return together(definitions(starts, without))


def definitions(starts: Iterable[str], without: Iterable[str] = HOUSE) -> dict[str, str]:
    """Returns {"module:name": hash} of the definitions that `fingerprint` combines."""
    without = frozenset(without)
    found: dict[str, str] = {}
    for start in starts:
        found |= _reached(ROOT, start, without)
    return found


@cache
def _reached(root: Path, start: str, without: frozenset[str]) -> dict[str, str]:
    """Returns {"module:name": hash} of the definitions that one start reaches."""
    module, _, name = start.partition(":")
    pending, seen = [_resolve(root, (module, name))], set()
    if pending == [None] and module not in without:
        raise ValueError(f"no definition {start!r}: is its name spelt right?")
    found: dict[str, str] = {}
    while pending:
        symbol = pending.pop()
        if symbol is None or symbol in seen or symbol[0] in without:
            continue
        seen.add(symbol)
        module, name = symbol
        hashed, mentions = _source(root, module).read(name)
        pending += mentions
        if hashed:  # a nameless function is called by its hash, because its line may move
            found[f"{module}:{LAMBDA + hashed if name.startswith(LAMBDA) else name}"] = hashed
    return found


def module_hash(text: str) -> str:
    """Returns the hash of one module's text, with its imports and without their contents."""
    tree = _Tree()
    for statement in _without_docstring(ast.parse(text).body):
        tree.write(statement)
    return digest(["".join(tree.pieces), *map(ast.unparse, tree.imports)])


def together(found: Mapping[str, str]) -> str:
    """Returns one hash of all definitions, whatever their modules."""
    return digest(sorted(set(found.values())))


def digest(content: object) -> str:
    """Returns 16 hexadecimal digits for a value whose `repr` is the same everywhere."""
    return hashlib.sha256(ascii(content).encode()).hexdigest()[:16]


def _declares(statement: ast.stmt) -> bool:
    """Returns whether a statement is an operator's declaration."""
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Call) and getattr(value.func, "id", None) == DECLARED[0]


# --------------------------------------------------------------------------------------- sources


class _Source:
    """Holds a module's top-level statements by the names that they bind."""

    def __init__(self, root: Path, module: str, file: Path) -> None:
        self.root, self.module = root, module
        self.package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        self.imported: dict[str, Symbol] = {}  # name → its origin, not yet resolved
        self.bound: dict[str, list[ast.stmt]] = {}
        self.registered: list[tuple[set[str], ast.stmt]] = []  # run for the names they mention
        self._nameless: list[ast.stmt] = []
        self._read: dict[str, tuple[str, list[Symbol]]] = {}
        self.tree = ast.parse(file.read_text())
        for statement in self.tree.body:
            self._add(statement)

    def read(self, name: str) -> tuple[str, list[Symbol]]:
        """Returns a definition's hash, and the symbols of ours that it mentions.

        The hash is "" if nothing is hashed.
        """
        if name not in self._read:
            mentions = [(self.module, bound) for bound in self.bound] if name == EVERYTHING else []
            texts = set()
            for statement in self._statements(name):
                text, mentioned = self._said(statement)
                texts.add(text)
                mentions += mentioned
            resolved = dict.fromkeys(_resolve(self.root, symbol) for symbol in mentions)
            self._read[name] = digest(sorted(texts)) if texts else "", list(filter(None, resolved))
        return self._read[name]

    @cached_property
    def _lambdas(self) -> list[ast.Lambda]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Lambda)]

    def _statements(self, name: str) -> list[ast.AST]:
        """Returns the statements that define a name, and statements that run for it."""
        if name == EVERYTHING:
            return self._nameless
        if name.startswith(LAMBDA):
            line = int(name.removeprefix(LAMBDA))
            return [node for node in self._lambdas if node.lineno == line]
        own = self.bound[name]
        if name in DECLARED or any(map(_declares, own)):
            return []
        return own + [one for names, one in self.registered if name in names and one not in own]

    def _add(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self.imported |= self._imports(statement)
            return
        if _idle(statement):
            return
        names = set()
        for inner in _same_scope(statement):
            if isinstance(inner, (ast.Import, ast.ImportFrom)):
                self.imported |= self._imports(inner)
            names |= _bound(inner)
        for name in names:
            self.bound.setdefault(name, []).append(statement)
        if not names:
            self._nameless.append(statement)
        run_for = _registers(statement) if names else _names(statement)
        if run_for:
            self.registered.append((run_for, statement))

    def _imports(self, node: ast.Import | ast.ImportFrom) -> dict[str, Symbol]:
        """Returns {name that is bound: (module, name there)}; a whole module has `EVERYTHING`."""
        if isinstance(node, ast.Import):
            found = {}
            for a in node.names:
                module = a.name if a.asname else a.name.split(".")[0]
                found[a.asname or module] = module, EVERYTHING
            return found
        above = self.package.split(".")
        parts = above[: len(above) + 1 - node.level] if node.level else []
        base = ".".join([*parts, *filter(None, [node.module])])
        return {a.asname or a.name: (base, a.name) for a in node.names}

    def _said(self, statement: ast.AST) -> tuple[str, list[Symbol]]:
        """Returns a statement as text, and the symbols of ours that it mentions."""
        tree = _Tree()
        tree.write(statement)
        imported = dict(self.imported)
        for node in tree.imports:
            imported |= self._imports(node)
        mentions = [symbol for symbol in tree.strings if is_ours(symbol[0])]
        libraries = set()
        for name, *attributes in tree.chains:
            if name in self.bound:
                mentions.append((self.module, name))
            elif name in imported and not is_ours(imported[name][0]):
                libraries.add((name, *imported[name]))
            elif name in imported:
                symbol = imported[name]
                for attribute in attributes:  # through modules, as far as they are modules
                    module, rest = _resolve(self.root, symbol) or symbol
                    if rest != EVERYTHING:
                        break
                    symbol = (module, attribute)
                mentions.append(symbol)
        return "".join(tree.pieces) + ascii(sorted(libraries)), mentions


def is_ours(module: str) -> bool:
    """Returns whether a module's definitions are followed, by its name or by "module:NAME"."""
    package = module.partition(":")[0].split(".")[0]
    return package in PACKAGES or package in source_packages()


@cache
def _source(root: Path, module: str) -> Any:
    """Returns the reader of a module's file, a `_Source` or one like it, or None without a file."""
    package = module.split(".")[0]
    path = _parent(root, package).joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    file = next((file for file in files if file.is_file()), None)
    if file:
        return _Source(root, module, file)
    if package not in source_packages():
        return None
    reader = source_packages()[package].load()
    file = next((f for f in map(path.with_suffix, reader.suffixes) if f.is_file()), None)
    return reader(file) if file else None


@cache
def _parent(root: Path, package: str) -> Path:
    """Returns the folder that holds a package: `root`, or where another distribution lies."""
    spec = None if package in PACKAGES else find_spec(package)
    return Path(spec.origin).parents[1] if spec and spec.origin else root


@cache
def _resolve(root: Path, symbol: Symbol) -> Symbol | None:
    """Returns where a symbol is defined, or None if it is not ours. Re-exports are followed."""
    module, name = symbol
    if not is_ours(module):
        return None
    source = _source(root, module)
    if name == EVERYTHING or name.startswith(LAMBDA):
        return symbol if source else None
    if source is not None and name in source.bound:
        return symbol
    if source is not None and source.imported.get(name, symbol) != symbol:
        return _resolve(root, source.imported[name])
    return (f"{module}.{name}", EVERYTHING) if _source(root, f"{module}.{name}") else None


def _idle(statement: ast.stmt) -> bool:
    """Returns whether a run skips it: a docstring, `if TYPE_CHECKING`, `if __name__ == …`."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    if not isinstance(statement, ast.If):
        return False
    tested = _names(statement.test)
    return "TYPE_CHECKING" in tested or "__name__" in tested


def _same_scope(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yields a statement and those inside its `if`, `try` or `with`, which bind module names."""
    yield statement
    if isinstance(statement, SCOPES):
        return
    for node in ast.iter_child_nodes(statement):
        inner = [node] if isinstance(node, ast.stmt) else getattr(node, "body", None)
        for one in inner if isinstance(inner, list) else ():
            yield from _same_scope(one)


def _bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, SCOPES):
        return {statement.name}
    targets = [*getattr(statement, "targets", ()), getattr(statement, "target", None)]
    nodes = (node for target in filter(None, targets) for node in ast.walk(target))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _registers(statement: ast.stmt) -> set[str]:
    """Returns the names that a decorator registers a function for, as `@op.register_fake` does."""
    found: set[str] = set()
    for decorator in getattr(statement, "decorator_list", ()):
        function = getattr(decorator, "func", decorator)
        found |= _names(decorator) - {getattr(function, "id", None)}
    return found


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


# ------------------------------------------------------------------------------------------ trees


class _Tree:
    """Writes a syntax tree as text, and collects its names, imports and strings of code."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.chains: set[tuple[str, ...]] = set()
        self.strings: set[Symbol] = set()
        self.imports: list[ast.Import | ast.ImportFrom] = []

    def write(self, node: ast.AST) -> None:
        kind, add = type(node), self.pieces.append
        if kind is ast.Name or kind is ast.Attribute:
            chain = _chain(node)
            if chain:
                self.chains.add(chain)
                return add(".".join(chain))
        elif kind is ast.Constant:
            value = node.value
            if isinstance(value, str) and (named := NAMED.fullmatch(value)):
                self.strings.add(named.groups())
                value = named[2]
            return add(ascii(value))
        elif kind is ast.Import or kind is ast.ImportFrom:
            self.imports.append(node)
            modules = [a.name for a in node.names] if kind is ast.Import else [node.module]
            if getattr(node, "level", 0) or all(map(is_ours, modules)):
                return None  # the users of the imported names are hashed with them
        add(f"{kind.__name__}(")
        for name in kind._fields:
            value = getattr(node, name, None)
            if value is None or name in IGNORED:
                continue
            if isinstance(value, list):
                if name == "body" and kind in SCOPES:
                    value = _without_docstring(value)
                elif name == "values" and kind is ast.JoinedStr:
                    value = _merged(value)
                if value:
                    add(f"{name}[")
                    for inner in value:
                        self.write(inner) if isinstance(inner, ast.AST) else add(ascii(inner))
                        add(",")
                    add("]")
            elif isinstance(value, ast.AST):
                add(f"{name}=")
                self.write(value)
                add(",")
            else:
                add(f"{name}={value!a},")
        return add(")")


def _chain(node: ast.AST) -> tuple[str, ...]:
    """Returns ("a", "b", "c") for `a.b.c`, ("a",) for `a`; () if it does not start with a name."""
    parts: list[str] = []
    inner: ast.AST = node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    return (inner.id, *reversed(parts)) if isinstance(inner, ast.Name) else ()


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0].value if isinstance(body[0], ast.Expr) else None
    is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return body[1:] if is_text else body


def _merged(values: list[ast.expr]) -> list[ast.expr]:
    """Returns the parts of a formatted string, joined as no version of Python splits them."""
    merged: list[ast.expr] = []
    for value in values:
        last = merged[-1] if merged else None
        if isinstance(value, ast.Constant) and isinstance(last, ast.Constant):
            merged[-1] = ast.Constant(last.value + value.value)
        elif not isinstance(value, ast.Constant) or value.value:
            merged.append(value)
    return merged
