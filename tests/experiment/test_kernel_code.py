"""Tests that a kernel's hash changes with its meaning alone, and that launches are noted."""

import pytest
import torch
import triton

from tnp.experiment.code_hash import definitions, fingerprint, module_hash
from tnp.experiment.fingerprints import installed_hash
from tnp.experiment.kernel_code import kernel_hash, launches
from tnp.ops.rms_norm import add_rms_norm


def test_a_kernels_hash_is_of_all_that_it_reaches() -> None:
    """`test_fingerprints.py` tests which code that is."""
    module, name = "tnp.ops._shared.hopper_silu", "matmul_silu_hopper_kernel"
    assert kernel_hash(module, name) == fingerprint([f"{module}:{name}"])
    aggregate = "tnp.ops._shared.hopper_matmul:Pipeline"  # whose methods the kernel calls
    assert aggregate in definitions([f"{module}:{name}"])


def test_a_kernel_of_somebody_else_has_the_hash_of_its_package() -> None:
    assert kernel_hash("tqdm.kernels", "kernel") == installed_hash("tqdm")
    assert kernel_hash("_a_script_of_somebody", "kernel") == ""


def test_a_modules_hash_is_the_same_in_every_version_of_python() -> None:
    """Python 3.12 divides a formatted string otherwise than 3.11."""
    text = '"""A script."""\nfrom a import b as c\nx = f"{a[\'b\']}: {c!r:>{d}} it\'s"\n'
    assert module_hash(text) == "a879a3deeaf36c0f"
    assert module_hash(text.replace("A script", "Another")) == module_hash(text)
    assert module_hash(text.replace("!r", "!s")) != module_hash(text)
    assert module_hash(text.replace("import b", "import d")) != module_hash(text)


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
