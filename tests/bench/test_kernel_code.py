"""A kernel's hash changes with its meaning and with nothing else; launches are noted."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from tnp.bench.kernel_code import kernel_hash, launches, module_hash
from tnp.ops.rms_norm import add_rms_norm

KERNEL = '''
import triton
import triton.language as tl
{imports}

SCALE = tl.constexpr({scale})


@triton.jit
def helper(x):
    return x + {offset}


class Unused:
    pass


@triton.jit
def kernel(x_ptr, BLOCK: tl.constexpr):
    """{docstring}"""
    x = tl.load(x_ptr + tl.arange(0, BLOCK))  # {comment}
    tl.store(x_ptr + tl.arange(0, BLOCK), {helper}(x) * SCALE)
'''
PLAIN = {
    "imports": "",
    "scale": 2.0,
    "offset": 1,
    "docstring": "Doubles.",
    "comment": "aligned",
    "helper": "helper",
}


def hash_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> str:
    """The hash of `kernel`, from a module of the same name in a folder of its own."""
    folder = folder / str(len(list(folder.iterdir())))
    folder.mkdir()
    (folder / "other_helpers.py").write_text(
        "import triton\n\n\n@triton.jit\ndef helper(x):\n    return x + 3\n"
    )
    (folder / "some_kernel.py").write_text(KERNEL.format(**PLAIN | changes))
    for module in ("some_kernel", "other_helpers"):
        sys.modules.pop(module, None)
    importlib.invalidate_caches()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        return kernel_hash(importlib.import_module("some_kernel").kernel.fn)


def test_comments_docstrings_and_folders_change_no_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = hash_of(tmp_path, monkeypatch)
    assert hash_of(tmp_path, monkeypatch) == plain
    changed = {"docstring": "Twice as much.", "comment": "not", "imports": "# a line more\n"}
    assert hash_of(tmp_path, monkeypatch, **changed) == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 3.0},
        {"offset": 2},
        {"helper": "other_helpers.helper", "imports": "import other_helpers"},
    ],
    ids=["a constant", "a function that it calls", "a function of another module"],
)
def test_what_a_kernel_computes_changes_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    assert hash_of(tmp_path, monkeypatch, **changes) != hash_of(tmp_path, monkeypatch)


def test_a_method_of_an_aggregate_is_part_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from tnp.ops.hopper_silu import matmul_silu_hopper_kernel as kernel

    read = inspect.getsource

    def edit(source: object) -> str:
        # In Pipeline.stage of tnp.ops.hopper_matmul.
        return read(source).replace("self.K_BLOCKS + k", "self.K_BLOCKS - k")

    before = kernel_hash(kernel.fn)
    kernel_hash.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(inspect, "getsource", edit)
        after = kernel_hash(kernel.fn)
    kernel_hash.cache_clear()
    assert after != before
    assert kernel_hash(kernel.fn) == before


def test_hashes_are_the_same_in_another_process(tmp_path: Path) -> None:
    """Another hash seed, another working folder."""
    script = (
        "import json, sys\n"
        "from tnp.bench.kernel_code import kernel_hash\n"
        "from tnp.ops.rms_norm import triton_rms_norm as module\n"
        "from triton.runtime.interpreter import InterpretedFunction\n"
        "from triton.runtime.jit import JITFunction\n"
        "kinds = JITFunction, InterpretedFunction\n"
        "print(json.dumps({name: kernel_hash(kernel.fn) for name, kernel in\n"
        "    vars(module).items() if isinstance(kernel, kinds)}))\n"
    )
    found = []
    for seed in ("1", "2"):
        environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PYTHONHASHSEED": seed,
        }
        child = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(child.stdout))
    assert found[0] == found[1]
    assert len(found[0]) == len(set(found[0].values())) > 1


def test_a_modules_hash_is_the_same_in_every_version_of_python() -> None:
    """Python 3.12 writes a formatted string out with other quotes than 3.11."""
    text = "x = f\"{a['b']}: {c!r:>{d}} it's\"\n"
    assert module_hash(text) == "a73e8d1c8d00"
    assert module_hash(text.replace("!r", "!s")) != module_hash(text)


@pytest.mark.skipif(
    not (torch.cuda.is_available() or triton.knobs.runtime.interpret),
    reason="kernels run on CUDA or in the interpreter",
)
def test_launches_are_noted_inside_the_block_alone() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    h, update, weight = (torch.ones(shape, device=device) for shape in ((3, 16), (3, 16), (16,)))
    with launches() as outer:
        with launches() as inner:
            add_rms_norm(h, update, weight, implementation="torch")
        add_rms_norm(h, update, weight, implementation="fused")
    add_rms_norm(h.half(), update.half(), weight, implementation="fused")
    assert inner == {}
    assert len(outer) == 1
    (name,) = outer
    assert name.startswith("tnp.ops.rms_norm.triton_rms_norm.")
