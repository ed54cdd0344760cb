"""Which Triton and Gluon kernels a piece of work launches, and a hash of what each of them says.

A kernel's hash is of its syntax tree, of the trees of all functions and aggregates outside Triton
that it names, and of the constants that these read. Comments, docstrings, positions and the paths
of files are not in it, so that a row keeps its proof when a comment is edited. Triton's own cache
key holds line numbers, and the hash of a compiled kernel holds tiles and sizes: both change where
the kernel's meaning does not.
"""

import ast
import hashlib
import inspect
import textwrap
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# Libraries whose functions stand in a kernel's package versions, not in its hash.
LIBRARIES = ("triton", "torch")
CONSTANTS = (bool, int, float, str)


@contextmanager
def launches() -> Iterator[dict[str, str]]:
    """Notes {kernel: hash} of every kernel that is launched while the block runs.

    Launches are slower meanwhile: nothing is timed inside. Kernels that `torch.compile` generates
    are not noted, because PyTorch's version and the modules that it compiles determine them.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from tnp.launch import watched

    noted: dict[str, str] = {}
    originals = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}

    def noting(run: types.FunctionType) -> types.FunctionType:
        def launch(kernel: Any, *arguments: Any, **options: Any) -> Any:
            if not _of_library(kernel.fn):
                noted[_name(kernel.fn)] = kernel_hash(kernel.fn)
            return run(kernel, *arguments, **options)

        return launch

    for kind, run in originals.items():
        kind.run = noting(run)
    try:
        with watched():
            yield noted
    finally:
        for kind, run in originals.items():
            kind.run = run


@cache
def kernel_hash(function: types.FunctionType) -> str:
    """Digest of all that a kernel says; `function` is what `triton.jit` or `gluon.jit` decorated.

    The same in every process and folder, under triton 3.6 and 3.7. Of a kernel with formatted
    strings it differs between Python 3.11 and 3.12.
    """
    definitions: dict[str, str] = {}
    pending: list[types.FunctionType | type] = [function]
    while pending:
        found = pending.pop()
        if _name(found) not in definitions:
            tree = source_tree(found)
            constants, named = _read_by(found, tree)
            definitions[_name(found)] = "\n".join([ast.unparse(tree), *sorted(constants)])
            pending += named
    return digest(sorted(definitions.items()))


def digest(content: object) -> str:
    """12 hexadecimal digits of a value whose `repr` is the same everywhere."""
    return hashlib.sha256(repr(content).encode()).hexdigest()[:12]


def source_tree(source: types.FunctionType | type | str) -> ast.Module:
    """The syntax tree of a function, a class or a file's text, without docstrings."""
    text = source if isinstance(source, str) else textwrap.dedent(inspect.getsource(source))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if is_text and isinstance(first.value.value, str):
                node.body = node.body[1:] or [ast.Pass()]
    return tree


def module_hash(text: str) -> str:
    """Digest of what a module's text says: the same in Python 3.11 to 3.13.

    They write formatted strings out differently, so each is a tuple of its parts here.
    """
    return digest(ast.unparse(ast.fix_missing_locations(_Parts().visit(source_tree(text)))))


class _Parts(ast.NodeTransformer):
    """Puts a tuple of its parts in place of each formatted string."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)
        # Python 3.12 adds an empty part to some.
        parts = [part for part in node.values if getattr(part, "value", None) != ""]
        return ast.Tuple(elts=parts, ctx=ast.Load())

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        self.generic_visit(node)
        parts = [node.value, ast.Constant(node.conversion), node.format_spec or ast.Constant(None)]
        return ast.Tuple(elts=parts, ctx=ast.Load())


def _read_by(
    owner: types.FunctionType | type, tree: ast.Module
) -> tuple[set[str], list[types.FunctionType | type]]:
    """The constants that `owner` reads, as text, and the functions and classes that it names."""
    scopes = _scopes(owner)
    constants, named = set(), []
    for node in ast.walk(tree):
        path = _path(node)
        value = _resolve(scopes, path) if path else None
        if value is None or isinstance(value, types.ModuleType):
            continue
        if hasattr(value, "fn"):  # decorated by triton.jit, gluon.jit or constexpr_function
            value = value.fn
        if isinstance(value, CONSTANTS) or type(value).__name__ == "constexpr":
            constants.add(f"{path[-1]} = {getattr(value, 'value', value)!r}")
        elif isinstance(value, types.FunctionType | type) and not _of_library(value):
            named.append(value)
    return constants, named


def _scopes(owner: types.FunctionType | type) -> list[dict[str, Any]]:
    """Where the names in the source of `owner` are looked up, the innermost first."""
    if isinstance(owner, type):
        functions = [getattr(value, "fn", value) for value in vars(owner).values()]
        functions = [value for value in functions if isinstance(value, types.FunctionType)]
        return [function.__globals__ for function in functions[:1]]
    closure = inspect.getclosurevars(owner).nonlocals if owner.__closure__ else {}
    return [closure, owner.__globals__]


def _path(node: ast.AST) -> tuple[str, ...]:
    """("a", "b") of the expression `a.b`; empty where `node` is no dotted name."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        owner = _path(node.value)
        return (*owner, node.attr) if owner else ()
    return ()


def _resolve(scopes: list[dict[str, Any]], path: tuple[str, ...]) -> Any:
    """What a dotted name stands for, through modules alone; None where that is not known."""
    value = next((scope[path[0]] for scope in scopes if path[0] in scope), None)
    for name in path[1:]:
        if not isinstance(value, types.ModuleType) or _of_library(value):
            return None
        value = getattr(value, name, None)
    return value


def _name(definition: types.FunctionType | type) -> str:
    return f"{definition.__module__}.{definition.__qualname__}"


def _of_library(definition: Any) -> bool:
    module = getattr(definition, "__module__", None) or getattr(definition, "__name__", "")
    return module.split(".")[0] in (*LIBRARIES, "builtins")
