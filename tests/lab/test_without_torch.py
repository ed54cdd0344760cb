"""Tests attention of NumPy arrays. The kernel runs on this CPU."""

import subprocess
import sys

import numpy as np
import pytest

from tests.lab import emulation
from tests.lab.judging import emulates
from tnp_lab.attention.without_torch import error, prepare


def drawn(*heads: int, n_q: int, n_k: int, head_dim: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0).standard_normal
    sizes = zip(heads, (n_q, n_k, n_k), strict=True)
    return [draw((2, h, n, head_dim)).astype(np.float16) for h, n in sizes]


@emulates
@pytest.mark.parametrize("causal, n_q, n_k, head_dim", [
    (False, 70, 101, 128), (True, 70, 101, 64), (True, 40, 20, 64)
])  # fmt: skip
def test_it_is_that_of_float64(causal, n_q, n_k, head_dim):
    q, k, v = drawn(4, 2, 2, n_q=n_q, n_k=n_k, head_dim=head_dim)
    o, lse = np.full_like(q, np.nan), np.full(q.shape[:3], np.nan, np.float32)
    prepared = prepare(q, k, v, causal)
    pointers = [x.ctypes.data for x in (q, k, v, o, lse)]
    emulation.loaded(prepared.source, "")(
        prepared.grid, prepared.threads, [*pointers, *prepared.numbers]
    )
    assert error(o, q, k, v, causal) <= 1
    assert not error(o, q, k, v, not causal) <= 1


def test_other_arrays_are_refused():
    q, k, v = drawn(4, 2, 2, n_q=9, n_k=9, head_dim=64)
    packed = np.ascontiguousarray
    for wrong in [
        (q, k, v.astype(np.float32)),
        (q, packed(k[:, :, 1:]), v),
        (packed(q[:, :3]), k, v),
        (q, k, v.swapaxes(1, 2).copy().swapaxes(1, 2)),
        (q[:0], k[:0], v[:0]),
        (packed(q[..., :32]), packed(k[..., :32]), packed(v[..., :32])),
    ]:
        with pytest.raises(ValueError, match=r"are float16\[[0-9, ]+\].* H_kv divides H"):
            prepare(*wrong, causal=False)


def test_nothing_imports_torch():
    code = "import sys, tnp_lab.attention.without_torch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
