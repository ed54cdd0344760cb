"""Tests that a fingerprint changes with the code that is reached, and with nothing else."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tnp.dispatch.registry import Listed, catalog
from tnp.dispatch.spec import Implementation
from tnp.experiment import code_hash, fingerprints
from tnp.ops import swiglu
from tnp_lab.sources import CudaSource

OPERATOR = '''
"""An operator."""
from __future__ import annotations
from typing import TYPE_CHECKING
from tnp.dispatch.spec import Implementation, Operation, Operator
from tnp.drawn import normal
if TYPE_CHECKING:
    from tnp.heavy import Heavy

def reference(x):
    """The formula."""
    import tnp.maths as maths
    return maths.twice(x)

def draw(case, random) -> Heavy:
    return normal(random)

OPERATOR = Operator("double", (Implementation("torch", run=reference),
    Implementation("triton", forward=Operation("double.forward", ("tnp.double.kernels:FORWARD",)))))

def double(x):
    from tnp.dispatch.call import call
    return call(OPERATOR, x)
'''
KERNELS = '''
import triton
from dataclasses import dataclass
from tnp.helpers import scaled as times
from tnp.double import other_kernels

SCALE = 2.0

@dataclass(frozen=True)
class Config:
    block: int = 16

@triton.jit
def _kernel(x_ptr):
    # A comment.
    return times(x_ptr) * SCALE

@_kernel.register_fake
def shape(x):
    return FAKE

FAKE = 1

def prepare(call, config, inputs):
    """Once a plan."""
    return lambda inputs, scalars: _kernel[(1,)](*inputs)

FORWARD = {"prepare": prepare, "configs": (Config(),),
    "name": f"{a['b']} {SCALE!r:>{8}} it's {{}}" "more"}
UNUSED = 3
'''
TREE = {
    "tnp/__init__.py": "",
    "tnp/double/__init__.py": OPERATOR,
    "tnp/double/kernels.py": KERNELS,
    "tnp/double/other_kernels.py": "from tnp.helpers import other\nFORWARD = other\n",
    "tnp/helpers.py": "import triton\n\n@triton.jit\ndef scaled(x):\n    return x + 1\n\n"
    "@triton.jit\ndef other(x):\n    return x + 2\n",
    "tnp/maths.py": "from torch import add\n\ndef twice(x):\n    return add(x, x)\n",
    "tnp/drawn.py": "def normal(random):\n    return random(4)\n",
    "tnp/heavy.py": "class Heavy:\n    pass\n",
    "tnp/dispatch/call.py": "def call(operator, x):\n    return x\n",
    "tnp/double/in_cuda.py": 'KERNEL = "tnp.double.twice:twice"\nFORWARD = {"kernel": KERNEL}\n',
    "tnp/double/twice.cu": '#include "tnp/add.cuh"\n#include <mma.h>\n// Twice.\n'
    'extern "C" __global__ void twice(const float* x) { add(x, x); }\n',
    "tnp/add.cuh": "/* A sum. */ __device__ void add(const float* x, const float* y) {}\n",
}
IN_CUDA = ["tnp.double.in_cuda:FORWARD"]
FORWARD = ["tnp.double.kernels:FORWARD"]
PLAIN = ["tnp.double:reference", "tnp.double:draw"]
USE = ["tnp.double:double"]


@pytest.fixture
def fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Hashes starts in the tree after edits (file, old, new), or moves of a file (file, to)."""

    def of(starts: list[str], *edits: tuple[str, ...], without=()) -> str:
        tree = dict(TREE)
        for edit in edits:
            if len(edit) == 2:
                tree[edit[1]] = tree.pop(edit[0])
            else:
                file, old, new = edit
                assert old in tree[file]
                tree[file] = tree[file].replace(old, new, 1)
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for file, text in tree.items():
            path = root / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        monkeypatch.setattr(code_hash, "ROOT", root)
        return code_hash.fingerprint(starts, without)

    return of


@pytest.mark.parametrize(
    "edit",
    [
        ("tnp/double/kernels.py", "# A comment.", "# Another.\n    # And another."),
        ("tnp/double/kernels.py", '"""Once a plan."""', '"""Other words."""'),
        ("tnp/double/kernels.py", "UNUSED = 3", "UNUSED = 4"),
        ("tnp/double/kernels.py", "\n\n@triton.jit", "\n\n\n\n@triton.jit"),
        ("tnp/double/__init__.py", "import tnp.maths", "import tnp.helpers\n    import tnp.maths"),
        ("tnp/helpers.py", "x + 2", "x + 3"),
        ("tnp/double/other_kernels.py", "FORWARD = other", "FORWARD = None"),
        ("tnp/double/__init__.py", 'Implementation("torch", run=reference),', ""),
    ],
    ids=str,
)
def test_what_is_not_reached_changes_nothing(fingerprint, edit) -> None:
    assert fingerprint(FORWARD, edit) == fingerprint(FORWARD)


@pytest.mark.parametrize(
    "edit",
    [
        ("tnp/helpers.py", "x + 1", "x - 1"),
        ("tnp/helpers.py", "@triton.jit", "@triton.jit(noinline=True)"),
        ("tnp/double/kernels.py", "SCALE = 2.0", "SCALE = 3.0"),
        ("tnp/double/kernels.py", "block: int = 16", "block: int = 32"),
        ("tnp/double/kernels.py", "FAKE = 1", "FAKE = 2"),
        ("tnp/double/kernels.py", "return FAKE", "return None"),
        ("tnp/double/kernels.py", "(*inputs)", "(*inputs, 1)"),
        ("tnp/double/kernels.py", "!r:>", "!s:>"),
        ("tnp/double/kernels.py", "import scaled as times", "import other as times"),
        ("tnp/double/kernels.py", "import triton\n", "import triton.experimental as triton\n"),
    ],
    ids=str,
)
def test_what_is_reached_changes_it(fingerprint, edit) -> None:
    assert fingerprint(FORWARD, edit) != fingerprint(FORWARD)


def test_a_helper_changes_exactly_what_reaches_it(fingerprint) -> None:
    others = ["tnp.double.other_kernels:FORWARD"]
    edit = ("tnp/helpers.py", "x + 1", "x - 1")
    assert fingerprint(FORWARD, edit) != fingerprint(FORWARD)
    for starts in (others, PLAIN, USE):
        assert fingerprint(starts, edit) == fingerprint(starts)
    edit = ("tnp/maths.py", "import add", "import sub as add")  # imported inside a function
    assert fingerprint(PLAIN, edit) != fingerprint(PLAIN)
    assert fingerprint(FORWARD, edit) == fingerprint(FORWARD)
    edit = ("tnp/heavy.py", "pass", "x = 1")  # imported for type checkers alone
    assert fingerprint(PLAIN, edit) == fingerprint(PLAIN)


def test_a_declaration_is_passed_by_and_the_house_where_it_is_named(fingerprint) -> None:
    """Users of an operator name its implementations; a device's time knows no house."""
    kernel = ("tnp/double/kernels.py", "SCALE = 2.0", "SCALE = 3.0")
    assert fingerprint(USE, kernel) == fingerprint(USE)
    house = ("tnp/dispatch/call.py", "return x", "return x + 0")
    assert fingerprint(USE, house) != fingerprint(USE)
    assert fingerprint(USE, house, without=code_hash.HOUSE) == fingerprint(
        USE, without=code_hash.HOUSE
    )


def test_a_string_that_names_code_reaches_it_and_a_moved_file_is_the_same_code(fingerprint) -> None:
    named = ("tnp/double/other_kernels.py", "= other", '= "tnp.maths:twice"')
    start = ["tnp.double.other_kernels:FORWARD"]
    edit = ("tnp/maths.py", "add(x, x)", "add(x, 2)")
    assert fingerprint(start, named, edit) != fingerprint(start, named)
    moved = ("tnp/maths.py", "tnp/sums.py"), (*named[:2], '= "tnp.sums:twice"')
    assert fingerprint(start, *moved) == fingerprint(start, named)
    moved = [
        ("tnp/helpers.py", "tnp/parts/helpers.py"),
        ("tnp/double/kernels.py", "tnp.helpers", "tnp.parts.helpers"),
        ("tnp/double/other_kernels.py", "tnp.helpers", "tnp.parts.helpers"),
        ("tnp/double/kernels.py", "tnp/double/moved.py"),
    ]
    assert fingerprint(["tnp.double.moved:FORWARD"], *moved) == fingerprint(FORWARD)


def test_cuda_and_its_headers_count_less_their_comments(fingerprint, monkeypatch) -> None:
    """A class that a distribution brings reads files that are no Python."""
    reader = SimpleNamespace(load=lambda: CudaSource)
    monkeypatch.setattr(code_hash, "source_packages", lambda: {"tnp": reader})
    plain = fingerprint(IN_CUDA)
    for edit in (
        ("tnp/double/twice.cu", "// Twice.", "// Two times.\n"),
        ("tnp/add.cuh", "/* A sum. */", "/* A\n sum. */"),
    ):
        assert fingerprint(IN_CUDA, edit) == plain
    for edit in (
        ("tnp/double/twice.cu", "add(x, x)", "add(x, x + 1)"),
        ("tnp/double/twice.cu", "<mma.h>", "<cuda_fp16.h>"),
        ("tnp/add.cuh", "{}", "{ return; }"),
    ):
        assert fingerprint(IN_CUDA, edit) != plain
    for gone in ("tnp.double.twice:thrice", "tnp.double.kernels:BACKWARD"):
        with pytest.raises(ValueError, match=f"no definition '{gone}'"):
            fingerprint([gone])


def test_definitions_are_rows_of_their_own(fingerprint) -> None:
    """The hash is the same on every Python: 3.12 divides formatted strings otherwise than 3.11."""
    assert fingerprint(FORWARD) == "178be998566fd9e1"
    before = code_hash.definitions(FORWARD, ())
    fingerprint(FORWARD, ("tnp/helpers.py", "x + 1", "x - 1"))
    after = code_hash.definitions(FORWARD, ())
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == ["tnp.helpers:scaled"]


# ------------------------------------------------------------------------- operators of the house


def every() -> list:
    known = catalog()
    return [known.listed(op, name) for op in known.operators for name in known.names(op)]


def of_implementation(one: Listed, use: str = fingerprints.BENCHMARK) -> str:
    return code_hash.together(fingerprints.implementation_definitions(one, use))


def test_every_operator_and_implementation_has_one() -> None:
    uses = (fingerprints.STEP, fingerprints.BENCHMARK, fingerprints.GATE)
    for op in catalog().operators:
        found = [fingerprints.operator_definitions(op, use) for use in uses]
        assert len(set(map(code_hash.together, found))) == 3
    hashes = {(one.op, one.name): of_implementation(one) for one in every()}
    assert all(hashes.values())
    ours = [one for one in every() if one.own and one.own.forward]
    kernels = {
        (one.own.forward.kernels, one.own.backward and one.own.backward.kernels) for one in ours
    }
    assert len({hashes[one.op, one.name] for one in ours}) == len(kernels)


def test_what_is_said_of_an_implementation_is_of_its_gate() -> None:
    listed = catalog().listed("swiglu", "triton")
    narrower = replace(listed, own=replace(listed.own, dtypes=("bfloat16",)))
    same = [of_implementation(one) for one in (listed, narrower)]
    gates = [of_implementation(one, fingerprints.GATE) for one in (listed, narrower)]
    assert same[0] == same[1] and gates[0] != gates[1]


def test_a_function_made_with_another_is_of_both() -> None:
    run = partial(swiglu.describe, swiglu.reference)
    listed = Listed("swiglu", "made", 0, Implementation("made", run=run))
    found = fingerprints.implementation_definitions(listed)
    assert {"tnp.ops.swiglu:describe", "tnp.ops.swiglu:reference"} <= found.keys()


def test_planning_imports_no_torch_and_no_altair() -> None:
    """Declarations of some operators import torch, and figures import Altair."""
    code = (
        "import sys, tnp.experiment.fingerprints, tnp.figures.story\n"
        "assert not {'torch', 'triton', 'altair', 'vl_convert'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=code_hash.ROOT)


# ------------------------------------------------------------------------------- somebody else's


def install(site: Path, name: str, version: str, source: Path, editable: bool = False) -> None:
    """Writes what pip writes of a distribution of one package, which lies in `source`."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    extra = "Provides-Extra: theirs\nRequires-Dist: fast-kernels==1; extra == 'theirs'\n"
    (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n{extra}")
    entries = f"[tnp.implementations]\nswiglu.theirs = {name}:THEIRS\n"
    (folder / "entry_points.txt").write_text(entries if name == "adapters" else "")
    record = [f"{folder.name}/METADATA,sha256=irrelevant,3", f"{folder.name}/RECORD,,"]
    if editable:
        origin = {"url": f"file://{source.parent}", "dir_info": {"editable": True}}
        (folder / "direct_url.json").write_text(json.dumps(origin))
        (site / f"{name}.pth").write_text(str(source.parent))
        site = source.parent
    else:
        shutil.copytree(source, site / name)
        (site / name / "cached.pyc").touch()
        for file in sorted((site / name).glob("*.py")):
            hashed = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest())
            size = file.stat().st_size
            record.append(f"{name}/{file.name},sha256={hashed.decode().rstrip('=')},{size}")
    (folder / "RECORD").write_text("\n".join(record) + "\n")


@pytest.fixture
def installed(tmp_path: Path):
    """Hashes `swiglu.theirs` where these are installed, by a process of its own."""
    sources = tmp_path / "sources"
    for name in ("adapters", "fast_kernels"):
        (sources / name).mkdir(parents=True)
        (sources / name / "__init__.py").write_text("raise ImportError('planning imports this')\n")

    def of(kernels: str = "1", adapters: str = "1", editable: bool = False) -> str:
        site = tmp_path / str(len(list(tmp_path.iterdir())))
        install(site, "fast_kernels", kernels, sources / "fast_kernels")
        install(site, "adapters", adapters, sources / "adapters", editable)
        code = (
            "import sys\n"
            "from tnp.dispatch.registry import catalog\n"
            "from tnp.experiment.code_hash import together\n"
            "from tnp.experiment.fingerprints import implementation_definitions\n"
            "found = implementation_definitions(catalog().listed('swiglu', 'theirs'))\n"
            "print(together(found), *found)\n"
            "assert not {'adapters', 'fast_kernels'} & sys.modules.keys()"
        )
        path = os.pathsep.join(map(str, [code_hash.ROOT, site, *([sources] if editable else [])]))
        child = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path,
        )  # fmt: skip
        assert child.returncode == 0, child.stderr
        found, *parts = child.stdout.split()
        assert parts == ["fast-kernels:", "adapters:"]
        return found

    of.sources = sources
    return of


def test_somebody_elses_is_of_its_packages_as_they_are_installed(installed) -> None:
    before = installed()
    assert installed() == before
    assert installed(adapters="2") == before  # the same files under another version
    assert installed(editable=True) == before
    kernels = installed.sources / "fast_kernels/__init__.py"
    kernels.write_text("raise ImportError('another version')\n")
    changed = installed(kernels="1.1")
    adapter = installed.sources / "adapters/__init__.py"
    adapter.write_text("raise ImportError('an edited adapter')\n")
    edited = installed(kernels="1.1")
    assert len({before, changed, edited}) == 3
    assert installed(kernels="1.1", editable=True) == edited
    assert fingerprints.installed_hash("no-such-package-of-anybody") == ""
