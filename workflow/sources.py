"""Which source files a job depends on, read from the imports without importing anything.

Jobs carry a fingerprint of them as a parameter, so that editing one kernel voids its own gate and
benchmarks and nothing else, and a comment nothing at all.
"""

import ast
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tnp.bench.kernel_code import digest, module_hash
from tnp.bench.outcome import implementation_of
from tnp.bench.sizes import CEILINGS
from tnp.gates import GATES, KERNEL_GATES
from tnp.gates import gate as about_gate
from tnp.ops import registry
from tnp.variants import Variant

ROOT = Path(__file__).resolve().parent.parent

# Which kernel runs, of our own; and which implementation, where "auto" may choose.
TUNED = ROOT / "tnp/tuned/nvidia-h200.json"
CHOSEN = ROOT / "tnp/ops/tuned/implementations.json"

# How rows and tables are written, not what is measured: a column added there voids no measurement.
NOT_MEASURED = frozenset({"tnp.schemas", "tnp.store", "tnp.ops.tables"})


def of_gate(gate: str) -> list[str]:
    """A gate of the model leaves our kernels out, whose own gates answer for them, but one."""
    about = about_gate(gate)
    if gate not in GATES:  # generic: it names all its modules
        return _using(about.modules, set())
    used = {
        (op, name)
        for op, name in _implementations()
        if gate in KERNEL_GATES.get((op, name), ())
        or name.startswith("sdpa_")
        or name in ("reference", "torch")
        or (about.ours and name in ("separate", "fused"))
    }
    return _using([f"tnp.gates.{gate}", *about.modules], used)


def of_step(parameters: dict) -> list[str]:
    return _using(["tnp.bench.steps"], _of_variant(parameters))


def of_op(parameters: dict) -> list[str]:
    """The other operators, which the benchmark can time as well, are left out."""
    op, name = parameters["op"], parameters["implementation"]
    others = {f"tnp.ops.{other}" for other in registry.operators() if other != op}
    return _using(["tnp.bench.measure"], set() if op in CEILINGS else {(op, name)}, others)


def of_training(parameters: dict) -> list[str]:
    return _using(["tnp.train"], _of_variant(parameters))


def with_modules(kind: str, parameters: dict) -> dict:
    """A job's parameters with `modules`: the hashes of what a "step" or "op" runs, by name.

    Of an operator's benchmark they are those of each implementation, by its name.
    """
    if kind == "step":
        return parameters | {"modules": hashes(of_step(parameters))}
    names = dict.fromkeys(map(implementation_of, parameters["implementations"]))
    modules = {name: hashes(of_op(parameters | {"implementation": name})) for name in names}
    return parameters | {"modules": modules}


def hashes(files: Iterable[str]) -> dict[str, str]:
    """{module: hash} of those `files` that are Python; comments and docstrings are not in a hash.

    Tables of tuned kernels are no module: what they chose stands in the rows' `launch_config`.
    """
    paths = [Path(file).resolve() for file in files if file.endswith(".py")]
    return {_module(path): _hash(path) for path in paths}


def fingerprint(script: str, files: Iterable[str]) -> str:
    """Digest of what a job of workflow/scripts/`script`.py runs, which sees the script and `files`.

    Of Python it sees no comment and no docstring, of anything else all.
    """
    return _fingerprint(os.path.relpath(ROOT / f"workflow/scripts/{script}.py"), *files)


def views() -> list[str]:
    return _relative(sorted(ROOT.joinpath("workflow/sql").glob("*.sql")))


def closure(modules: Iterable[str], without: Iterable[str] = ()) -> list[Path]:
    """Files of `modules` and of all they import from `tnp`, sorted.

    An import of a module in `without` is not followed; one that is named in `modules` is kept.
    """
    pending = list(modules)
    without = (NOT_MEASURED | set(without)) - set(pending)
    seen: set[str] = set()
    while pending:
        module = pending.pop()
        if module not in seen and module not in without:
            seen.add(module)
            pending += _imports(module)
    return sorted(_file(module) for module in seen)


def _of_variant(parameters: dict) -> set[tuple[str, str]]:
    variant = Variant.from_spec(parameters["variant"], parameters["variant_spec"])
    return set(variant.implementations().items())


def _using(
    modules: Iterable[str],
    implementations: set[tuple[str, str]],
    without: Iterable[str] = (),
) -> list[str]:
    """Files of `modules` and of these (operator, implementation) pairs, no other kernel's."""
    automatic = any(name == "auto" for _, name in implementations)
    implementations = implementations | {
        (op, candidate)
        for op, name in implementations
        for candidate in registry.candidates(op, name)
    }
    used = {module for pair in implementations for module in registry.get(*pair).modules}
    every = {module for pair in _implementations() for module in registry.get(*pair).modules}
    files = closure({*modules, *used}, without={*(every - used), *without})
    tables = [TUNED] if any(module in used for module in registry.OURS) else []
    tables += [CHOSEN] if automatic else []
    return _relative(files + tables)


def _implementations() -> list[tuple[str, str]]:
    return [(op, name) for op in registry.operators() for name in registry.names(op)]


def _relative(files: Iterable[Path]) -> list[str]:
    """As seen from the working directory: a checkout that was moved reruns nothing."""
    return [os.path.relpath(file) for file in files]


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache  # most jobs run the same files as another
def _fingerprint(*files: str) -> str:
    tables = [Path(file).resolve() for file in files if not file.endswith(".py")]
    contents = {str(table.relative_to(ROOT)): table.read_text() for table in tables}
    return digest(sorted((hashes(files) | contents).items()))


@cache
def _hash(file: Path) -> str:
    return module_hash(file.read_text())


@cache
def _file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


@cache
def _imports(module: str) -> tuple[str, ...]:
    """Modules of `tnp` that `module` imports anywhere, function bodies included."""
    file = _file(module)
    if file is None:
        raise ValueError(f"no source file for module {module!r}: is its name spelt right?")
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join(parts) if node.level else ""
            origin = ".".join(filter(None, [base, node.module]))
            found += [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
    # `from tnp.ops import attention` names a module, `from tnp.model import TNPConfig` does not.
    return tuple(name for name in found if name.split(".")[0] == "tnp" and _file(name))
