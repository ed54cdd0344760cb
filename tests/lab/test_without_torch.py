"""Tests attention of NumPy arrays. The kernel runs on this CPU."""

import subprocess
import sys

import numpy as np
import pytest

from tests.lab import emulation
from tests.lab.judging import emulates
from tnp_lab.attention.without_torch import in_float64, prepare


def drawn(*heads: int, n_q: int, n_k: int, head_dim: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0).standard_normal
    sizes = zip(heads, (n_q, n_k, n_k), strict=True)
    return [draw((2, h, n, head_dim)).astype(np.float16) for h, n in sizes]


@emulates
@pytest.mark.parametrize("causal, head_dim", [(False, 128), (True, 64)])
def test_it_is_that_of_float64(causal, head_dim):
    q, k, v = drawn(4, 2, 2, n_q=70, n_k=101, head_dim=head_dim)
    o, lse = np.full_like(q, np.nan), np.full(q.shape[:3], np.nan, np.float32)
    prepared = prepare(q, k, v, causal)
    pointers = [x.ctypes.data for x in (q, k, v, o, lse)]
    emulation.loaded(prepared.source, "")(
        prepared.grid, prepared.threads, [*pointers, *prepared.numbers]
    )
    bound = 2**-10 * np.abs(v).max()
    assert np.abs(o - in_float64(q, k, v, causal)).max() <= bound
    assert not np.abs(o - in_float64(q, k, v, not causal)).max() <= bound


def test_other_arrays_are_refused():
    q, k, v = drawn(4, 2, 2, n_q=9, n_k=9, head_dim=64)
    for wrong in [(q, k, v.astype(np.float32)), (q, k[:, :, 1:], v), (q[:, :3], k, v)]:
        with pytest.raises(ValueError, match=r"are float16\[2, [34], 9, 64\].* H_kv divides H"):
            prepare(*wrong, causal=False)


def test_nothing_imports_torch():
    code = "import sys, tnp_lab.attention.without_torch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
