"""Tests projections without bias: weight gradients, layouts, centred keys.

The gate compares them with float64 (`tests.gates.test_operators`).
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tnp.dispatch import plans
from tnp.dispatch.call import forget
from tnp.gates.checks import relative_error
from tnp.ops.attention import attention
from tnp.ops.projection import PROJECT_QKV, linear, products, project_qkv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, device=DEVICE, generator=generator).to(dtype)


def weight_gradients(dtype: torch.dtype, rows: int = 4096) -> dict[str, torch.Tensor]:
    """Returns weight gradients of both functions for gradients of 1: sums of products x · 1."""
    x = draw(2, rows // 2, 16, dtype=dtype)
    weight = draw(48, 16).requires_grad_()
    q, k, v = project_qkv(x, weight, 2, implementation="fused")
    (qkv,) = torch.autograd.grad([q, k, v], weight, [torch.ones_like(y) for y in (q, k, v)])
    y = linear(x, weight, implementation="fused")
    (alone,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    exact = x.double().sum((0, 1)).expand(48, 16)
    return {"exact": exact, "qkv": qkv, "linear": alone}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_are_float32_and_never_rounded(dtype):
    found = weight_gradients(dtype)
    for name in ("qkv", "linear"):
        assert found[name].dtype == torch.float32
        assert relative_error(found[name], found["exact"]) < 1e-5, name
        # The control: rounded to the activations' dtype they would be further off.
        assert relative_error(found[name].to(dtype), found["exact"]) > 1e-4, name


def test_outputs_are_views_of_rows():
    x, weight = draw(2, 7, 24), draw(72, 24)
    q, k, v = project_qkv(x, weight, 3, n_k=4, first=2, implementation="fused")
    assert q.shape == (2, 3, 5, 8) and k.shape == v.shape == (2, 3, 4, 8)
    assert q.transpose(1, 2).is_contiguous()
    assert k.stride() == v.stride() == (4 * 48, 8, 48, 1)
    assert v.data_ptr() == k.data_ptr() + 24 * 4


def products_of(function) -> list[tuple[int, ...]]:
    """Returns shapes of the products that PyTorch makes in a call of `function`, in its order."""
    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm", "baddbmm_"):
                found.append(tuple(out.shape))
            return out

    with Watch():
        function()
    return found


def halves(batch: int, n_k: int, n_heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Returns dk and dv as attention leaves them."""
    return draw(batch, n_k, 2, n_heads, head_dim).permute(2, 0, 3, 1, 4).unbind()


def apart(batch: int, n_k: int, n_heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Returns two tensors with the strides of halves."""
    dk, dv = halves(batch, n_k, n_heads, head_dim)
    memory = torch.stack([dv, dk]).permute(1, 3, 0, 2, 4).contiguous()  # values come first
    dv, dk = memory.permute(2, 0, 3, 1, 4).unbind()
    assert dk.stride() == halves(batch, n_k, n_heads, head_dim)[0].stride()
    return dk, dv


LAYOUTS = {
    "halves": halves,
    "other memory": apart,
    "rows": lambda *sizes: [x.transpose(1, 2).contiguous().transpose(1, 2) for x in halves(*sizes)],
    "heads": lambda *sizes: [x.contiguous() for x in halves(*sizes)],
    "expanded": lambda *sizes: [x[:, :, :1].expand_as(x) for x in halves(*sizes)],
}


@pytest.mark.parametrize("n_k, first", [(7, 0), (4, 0), (5, 2), (4, 4), (2, 5), (1, 0)])
@pytest.mark.parametrize("given", [(0, 1, 2), (1, 2), (0, 1), (2,)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("base2", [False, True])
def test_gradients_of_any_layout(n_k, first, given, layout, base2):
    batch, d_model, n_heads = 3, 24, 2
    x, weight = draw(batch, 7, d_model).requires_grad_(), draw(72, d_model).requires_grad_()
    sizes = {"n_k": n_k, "first": first, "base2": base2}
    arriving = draw(batch, 7 - first, n_heads, 12).transpose(1, 2)
    arriving = arriving, *LAYOUTS[layout](batch, n_k, n_heads, 12)
    found = []
    for of, name in ((torch.float64, "torch"), (torch.float32, "fused")):
        leaves = [leaf.detach().to(of).requires_grad_() for leaf in (x, weight)]
        outputs = project_qkv(*leaves, n_heads, **sizes, implementation=name)
        some, gradients = ([of_all[i] for i in given] for of_all in (outputs, arriving))
        found.append(torch.autograd.grad(some, leaves, [dy.to(of) for dy in gradients]))
    for exact, ours in zip(*found, strict=True):
        assert relative_error(ours, exact) < 1e-6


@pytest.mark.parametrize("n_k, first", [(7, 0), (4, 0), (4, 4)])
def test_keys_and_values_are_one_product_each_way(n_k, first):
    """dk and dv are halves of the same rows; else two products are made, whatever strides say."""
    x, weight = draw(2, 7, 24), draw(72, 24)
    options = ("n_heads", 2), ("n_q", 7 - first), ("n_k", n_k)
    inputs = x, weight, None
    plan = plans.build(PROJECT_QKV, "fused", inputs, options, ("x", "weight"))
    assert len(products_of(lambda: plan.forward(inputs, ()))) == 2
    dq = draw(2, 7 - first, 2, 12).transpose(1, 2)

    def count(dk, dv):
        return len(products_of(lambda: plan.backward((dq, dk, dv), inputs[:2], (), ())))

    sizes = 2, n_k, 2, 12
    assert [count(*LAYOUTS[layout](*sizes)) for layout in LAYOUTS] == [4, 6, 6, 6, 6]
    assert count(*halves(*sizes)) == 4
    dk, dv = halves(*sizes)
    assert count(dv, dk) == 6 and count(dk, None) == count(None, dv) == 4
    assert len(plan.backwards) == 6


def test_of_one_row_halves_are_two():
    """The memory behind the only row of dk can be another tensor's."""
    dk, dv = halves(1, 1, 2, 12)
    assert not products._can_be_halves(dk, dv)
    assert products._can_be_halves(*halves(2, 1, 2, 12))
    assert products._can_be_halves(*halves(1, 2, 2, 12))


@pytest.mark.parametrize("of_attention", ["separate", "fused"])
@pytest.mark.parametrize("centred", [False, True])
def test_attention_and_projection_hand_halves_over(of_attention, centred, monkeypatch):
    """Through autograd, within a float64 reference; nothing is copied on the way."""
    x, weight, do = draw(2, 9, 32), draw(96, 32) / 6, draw(2, 2, 9, 16)
    seen = []
    lies = products._can_be_halves
    monkeypatch.setattr(products, "_can_be_halves", lambda *dy: seen.append(lies(*dy)) or seen[-1])
    forget()
    found = []
    for of, names in ((torch.float64, ("torch", "reference")), (None, ("fused", of_attention))):
        leaves = [leaf.detach().to(of or leaf.dtype).requires_grad_() for leaf in (x, weight)]
        options = {"n_k": 5, "base2": True, "centred": centred, "implementation": names[0]}
        qkv = project_qkv(*leaves, 2, **options)
        o = attention(*qkv, base2=True, implementation=names[1])
        found.append((o, *torch.autograd.grad(o, leaves, do.to(o.dtype))))
    assert seen == [True]
    for exact, ours in zip(*found, strict=True):
        assert relative_error(ours, exact) < 1e-5


def test_centred_keys_differ_from_others_by_one_vector_a_sample():
    x, weight = draw(3, 70, 32) + 5, draw(96, 32)
    lengths = torch.tensor([70, 1, 33], dtype=torch.int32, device=DEVICE)
    plain = project_qkv(x, weight, 2)
    centred = project_qkv(x, weight, 2, centred=True, n_keys=lengths)
    torch.testing.assert_close(centred[0], plain[0])
    torch.testing.assert_close(centred[2], plain[2])
    apart = plain[1] - centred[1]
    spread = (apart - apart[:, :, :1]).abs().max()
    assert spread < 1e-4 * apart.abs().max()
    # The second sample has one key alone, which is then all that is taken off.
    assert centred[1][1, :, 0].abs().max() < 1e-4 * plain[1].abs().max()


def test_padding_has_no_part_in_the_mean():
    x, weight = draw(2, 40, 32), draw(96, 32)
    lengths = torch.tensor([40, 7], dtype=torch.int32, device=DEVICE)
    other = x.clone()
    other[1, 7:] = 1e4
    keys = [
        project_qkv(rows, weight, 2, centred=True, n_keys=lengths, implementation="fused")[1]
        for rows in (x, other)
    ]
    assert torch.equal(keys[0][0], keys[1][0])
    assert torch.equal(keys[0][1, :, :7], keys[1][1, :, :7])


@pytest.mark.parametrize("n_k", [70, 4100])
def test_rows_may_lie_in_any_order(n_k):
    """The last dimension of x is not contiguous, and some of its rows are keys."""
    x, weight = draw(2, 32, n_k + 5).transpose(1, 2), draw(96, 32)
    found, expected = (
        project_qkv(rows, weight, 2, n_k=n_k, centred=True, implementation=name)
        for rows, name in ((x, "fused"), (x.contiguous(), "torch"))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
