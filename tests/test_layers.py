"""Holds the rule of docs/architecture.md: which package may import which, and no circles."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the bottom up: what stands on one line imports only from the lines above it.
LAYERS = (
    ("util", "cuda_graphs"),
    ("tasks",),
    ("dispatch",),
    ("store",),
    ("experiment",),
    ("ops",),
    ("llm",),
    ("model",),
    ("train",),
    ("gates",),
    ("bench",),
    ("tuning",),
    ("figures", "plots"),
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def imports(path: Path) -> Iterator[str]:
    """Yields the full name of each module or name that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(root: Path) -> dict[str, Path]:
    """Returns {full name: file} of everything below `root`/tnp."""
    found = {}
    for path in (root / "tnp").rglob("*.py"):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def edges(found: dict[str, Path]) -> dict[str, set[str]]:
    """Returns {module: the modules of ours that it imports}, each as far as its name is one."""
    graph: dict[str, set[str]] = {}
    for name, path in found.items():
        graph[name] = set()
        for wanted in imports(path):
            while wanted and wanted not in found:
                wanted = wanted.rpartition(".")[0]
            if wanted and wanted != name:
                graph[name].add(wanted)
    return graph


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Returns what imports a package at its own height or above, a sentence each."""
    wrong = []
    for name, wanted in graph.items():
        for other in wanted:
            own, theirs = (one.split(".")[1] if "." in one else None for one in (name, other))
            if None in (own, theirs) or own == theirs or own == "_moved" or theirs == "_moved":
                continue
            if LEVEL[theirs] >= LEVEL[own]:
                wrong.append(f"{name} imports {other}")
    return wrong


def test_no_package_imports_one_above_it() -> None:
    assert upward(edges(modules(ROOT))) == []


def test_no_modules_import_each_other() -> None:
    graph = edges(modules(ROOT))
    packages = {name for name, path in modules(ROOT).items() if path.name == "__init__.py"}
    order = TopologicalSorter({name: wanted - packages for name, wanted in graph.items()})
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' → '.join(error.args[1])}")


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    """The negative control: a package of operators that imports the model."""
    for name in ("ops", "model"):
        (tmp_path / "tnp" / name).mkdir(parents=True)
    (tmp_path / "tnp/model/network.py").write_text("")
    (tmp_path / "tnp/ops/made.py").write_text("def f():\n    from tnp.model import network\n")
    assert upward(edges(modules(tmp_path))) == ["tnp.ops.made imports tnp.model.network"]


def test_there_are_at_most_thirteen_packages_and_two_modules() -> None:
    entries = [path for path in (ROOT / "tnp").iterdir() if not path.name.startswith("_")]
    packages = [path for path in entries if path.is_dir()]
    assert len(packages) <= 13 and len(entries) - len(packages) <= 2
    assert {path.stem for path in entries} == set(LEVEL)
