"""Tests inputs that operators refuse rather than cast, and rows that SDPA cannot read."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tnp.ops.attention import attention
from tnp.ops.attention.torch_forms import with_aligned_rows
from tnp.ops.mixture_nll import mixture_nll
from tnp.util.checks import numbers_on_host, require_between, require_cumulative

D = 16


def rows(offset: int = 0, padding: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Returns [1, 2, 3, 16], `offset` elements from an aligned address, rows `padding` apart."""
    storage = torch.arange(offset + 6 * (D + padding), dtype=torch.float32).to(dtype)
    assert storage.data_ptr() % 16 == 0
    return storage[offset:].view(1, 2, 3, D + padding)[..., :D]


@pytest.mark.parametrize(
    "x", [rows(), rows(8), rows(padding=8), rows(4, 4, torch.float32), rows()[:, :, :1]]
)
def test_rows_that_start_at_16_bytes_stay_where_they_are(x):
    assert with_aligned_rows(x) is x


@pytest.mark.parametrize(
    "x", [rows(1), rows(4), rows(padding=1), rows(padding=4), rows(1, 7), rows(2, 0, torch.float32)]
)
def test_rows_that_start_elsewhere_are_copied(x):
    copy = with_aligned_rows(x)
    assert torch.equal(copy, x)
    assert copy.data_ptr() % 16 == 0
    assert all(n * copy.element_size() % 16 == 0 for n in copy.stride()[:-1])


def test_a_stride_that_nothing_is_reached_by_does_not_matter():
    x = torch.ones(9 * D).half().as_strided((1, 1, 3, D), (7, 5, D, 1))
    assert with_aligned_rows(x) is x


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("implementation", ["sdpa_flash", "sdpa_cudnn"])
def test_sdpa_reads_rows_at_odd_offsets(implementation):
    q = rows(1, 7).cuda() * 1e-2
    k = torch.empty(1 + 6 * D, dtype=q.dtype, device="cuda")[1:].view(1, 2, 3, D).copy_(q)
    o = attention(q, k, k, implementation=implementation)
    exact = attention(q.double(), k.double(), k.double(), implementation="reference")
    torch.testing.assert_close(o.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("log_sigma", [-44.0, -46.0, -60.0, -89.0, -120.0])
@pytest.mark.parametrize("components", [1, 2, 3])
def test_a_target_out_of_every_components_reach(log_sigma, components):
    """From −46 on z² / 2 passes float32's range: inf, and other targets' gradients stay.

    PyTorch squares before it halves and is at inf a little earlier.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parameters = torch.randn(2, components, 3, generator=torch.Generator().manual_seed(0))
    parameters[0, :, 1] = torch.arange(1.0, components + 1)
    parameters[0, :, 2] = log_sigma
    y = torch.tensor([[0.3], [0.2]])

    def differentiated(implementation: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        inputs = [x.to(device, dtype).requires_grad_() for x in (parameters, y)]
        loss = mixture_nll(*inputs, implementation=implementation)
        return loss.detach(), *torch.autograd.grad(loss, inputs)

    ours, own = (differentiated(name, torch.float32) for name in ("fused", "torch"))
    for mine, theirs in zip(ours, own, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-5, atol=1e-6)
    loss, dparameters, dy = differentiated("torch", torch.float64)
    torch.testing.assert_close(ours[0], loss.float(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(ours[1][1], dparameters[1].float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours[2][1], dy[1].float(), rtol=1e-4, atol=1e-6)


def test_numbers_are_read_of_plain_int32_tensors_on_the_cpu_alone():
    x, seen = torch.tensor([3, 5], dtype=torch.int32), []
    assert numbers_on_host(x) == [3, 5] and numbers_on_host(x[None], 2) == [[3, 5]]
    with torch.inference_mode():
        assert numbers_on_host(x.clone()) == [3, 5]
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    for other in (None, [3], x.long(), x[None], x.to("meta"), fake):
        assert numbers_on_host(other) is None
    torch.func.vmap(lambda one: seen.append(numbers_on_host(one)) or one)(x[None])
    assert seen == [None]


def test_empty_ranges_and_short_tensors_pass():
    require_between("n_keys", torch.ones(1, dtype=torch.int32), 1, 0)
    require_between("n_keys", torch.ones(0, dtype=torch.int32), 1, 8)
    require_cumulative("cu_seqlens_q", torch.ones(1, dtype=torch.int32), "q", 8)
