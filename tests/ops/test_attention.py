"""Attention kernels against float64, within PyTorch's own error; what they refuse; controls."""

import pytest
import torch
import triton

from tnp.gates import attention_cases as cases
from tnp.gates.attention_cases import Case
from tnp.gates.checks import error_ratio, max_abs_error
from tnp.ops import registry
from tnp.ops.attention import _attention, _attention_backward, attention
from tnp.ops.attention import triton_backward

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [(1, 65), (63, 2), (64, 64), (65, 127), (129, 33), (564, 63)]
BUDGETS = {"o": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}  # times PyTorch's own error


def results(case: Case):
    inputs, do = cases.draw(case, DEVICE)
    return zip(
        ("o", "dq", "dk", "dv"),
        cases.run(inputs, do, "separate"),
        cases.pytorch_own(case, inputs, do),
        cases.reference(case, inputs, do),
        strict=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_q, n_k", SIZES)
def test_within_twice_and_thrice_pytorchs_error(n_q, n_k, dtype):
    for name, kernel, pytorch, exact in results(Case(1, 2, n_q, n_k, dtype=dtype)):
        assert error_ratio(kernel, pytorch, exact) <= BUDGETS[name], name


# Long enough for its queries to be split into segments once MIN_SEGMENT_TILES is lowered.
SPLIT = Case(2, 2, 200, 15, dtype=torch.float32)


@pytest.mark.parametrize("n_q", [1, 63])
def test_one_key_is_its_value_and_has_no_gradient_to_q_and_k(n_q):
    case = Case(2, 2, n_q, 1, dtype=torch.float32)
    for name, kernel, _, exact in results(case):
        assert max_abs_error(kernel, exact) <= 1e-5, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 32, 128])
def test_head_dims(head_dim, dtype):
    for name, kernel, pytorch, exact in results(Case(2, 3, 70, 40, head_dim, dtype)):
        assert error_ratio(kernel, pytorch, exact) <= BUDGETS[name], name


@pytest.mark.parametrize("magnitude", [0.0, 8.0, 40.0])
def test_from_all_equal_to_one_dominating_score(magnitude):
    case = Case(1, 2, 70, 40, dtype=torch.float32, magnitude=magnitude)
    for name, kernel, _, exact in results(case):
        assert max_abs_error(kernel, exact) <= 2e-4 * max(1.0, exact.abs().max().item()), name


def test_split_reduction_is_the_single_pass(monkeypatch):
    inputs, do = cases.draw(SPLIT, DEVICE)
    whole = cases.run(inputs, do, "separate")
    monkeypatch.setattr(triton_backward, "MIN_SEGMENT_TILES", 2)
    tiles = triton.cdiv(SPLIT.n_q, CONFIGS["dkdv", 4, 64].block_m)
    assert triton_backward.n_segments(4, tiles) > 1
    for split, once in zip(cases.run(inputs, do, "separate"), whole, strict=True):
        assert max_abs_error(split, once) <= 1e-4
        assert split.stride() == once.stride()


def test_segments_only_where_the_keys_do_not_fill_the_gpu():
    assert triton_backward.n_segments(n_programs=512, n_tiles=1000) == 1
    assert triton_backward.n_segments(n_programs=8, n_tiles=1000) == 33
    assert triton_backward.n_segments(n_programs=8, n_tiles=9) == 1


def test_every_element_is_written(monkeypatch):
    empty = torch.Tensor.new_empty

    def poisoned(self, *size, **options):
        return empty(self, *size, **options).fill_(float("nan"))

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    inputs, do = cases.draw(Case(2, 2, 67, 65, dtype=torch.float32), DEVICE)
    for out in cases.run(inputs, do, "separate"):
        assert out.isfinite().all()


def test_neighbouring_memory_is_neither_read_nor_written():
    """Rows past the slice are NaN: a kernel that reads one shows it."""
    rows = torch.full((1, 100, 3, 2, 64), float("nan"), device=DEVICE)
    rows[:, :67] = torch.randn(1, 67, 3, 2, 64, device=DEVICE)
    q, k, v = rows.permute(2, 0, 3, 1, 4)
    inputs = [x.requires_grad_() for x in (q[:, :, :67], k[:, :, :41], v[:, :, :41])]
    do = torch.randn(1, 2, 67, 64, device=DEVICE)
    for out in cases.run(inputs, do, "separate"):
        assert out.isfinite().all()


def test_two_runs_are_bit_equal():
    inputs, do = cases.draw(Case(1, 2, 130, 63), DEVICE)
    first, again = (cases.run(inputs, do, "separate") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_scores_far_below_zero():
    """Keys past a ragged end score 0: against these, a probability of 2⁷³⁸ if it were let in."""
    inputs, do = cases.draw(Case(1, 2, 33, 20, dtype=torch.float32), DEVICE)
    with torch.no_grad():
        inputs[0].copy_(inputs[0] * 0.01 + 8)
        inputs[1].copy_(inputs[1] * 0.01 - 8)
    kernel, exact = cases.run(inputs, do, "separate"), cases.reference(case, inputs, do)
    for out, expected in zip(kernel, exact, strict=True):
        assert max_abs_error(out, expected) <= 1e-3


def last_key_tile_dropped(q, k, v):
    return attention(q, k[:, :, :64], v[:, :, :64], implementation="separate")


def scale_missing(q, k, v):
    return attention(q, k, v, scale=1.0, implementation="separate")


def values_shifted_by_a_row(q, k, v):
    return attention(q, k, v.roll(1, 2), implementation="separate")


@pytest.mark.parametrize("wrong", [last_key_tile_dropped, scale_missing, values_shifted_by_a_row])
def test_negative_controls_fail(wrong):
    inputs, do = cases.draw(Case(1, 2, 130, 100), DEVICE)
    o = wrong(*inputs)
    outs = (o, *torch.autograd.grad(o, inputs, do))
    pytorch, exact = cases.pytorch_own(case, inputs, do), cases.reference(case, inputs, do)
    for (name, budget), *compared in zip(BUDGETS.items(), outs, pytorch, exact, strict=True):
        assert error_ratio(*compared) > 5 * budget, name


def test_offsets_pass_32_bits():
    """Rows 2³⁰ elements apart: the third starts where a 32-bit offset turns negative."""
    stride = 2**30
    memory = torch.empty(2 * stride + 3 * 64, dtype=torch.bfloat16, device=DEVICE)
    q, k, v = (
        memory.as_strided((1, 1, 3, 64), (0, 0, stride, 1), 64 * i).normal_().requires_grad_()
        for i in range(3)
    )
    do = torch.randn(1, 1, 3, 64, device=DEVICE).bfloat16()
    far = cases.run([q, k, v], do, "separate")
    near = cases.run([x.detach().contiguous().requires_grad_() for x in (q, k, v)], do, "separate")
    assert all(torch.equal(a, b) for a, b in zip(far, near, strict=True))


def test_expanded_output_gradient():
    inputs, _ = cases.draw(Case(1, 2, 33, 20, dtype=torch.float32), DEVICE)
    summed = torch.autograd.grad(attention(*inputs, implementation="separate").sum(), inputs)
    exact = cases.reference(inputs, torch.ones(1, 2, 33, 64, device=DEVICE))[1:]
    assert all(max_abs_error(a, b) < 1e-4 for a, b in zip(summed, exact, strict=True))


def test_no_queries():
    q, k = torch.zeros(1, 2, 0, 64, device=DEVICE), torch.randn(1, 2, 5, 64, device=DEVICE)
    k.requires_grad_()
    o = attention(q, k, k, implementation="separate")
    assert o.shape == (1, 2, 0, 64)
    o.sum().backward()
    assert (k.grad == 0).all()


@pytest.fixture(params=["single pass", "split"])
def reduction(request, monkeypatch):
    if request.param == "split":
        monkeypatch.setattr(triton_backward, "MIN_SEGMENT_TILES", 2)


def test_forward_operator_keeps_its_contract():
    inputs, _ = cases.draw(Case(1, 2, 33, 20, dtype=torch.float32), DEVICE)
    torch.library.opcheck(_separate, (*inputs, 0.125))


def test_backward_operator_keeps_its_contract(reduction):
    (q, k, v), do = cases.draw(SPLIT, DEVICE)
    q, k, v = (x.detach() for x in (q, k, v))
    o, lse = _separate(q, k, v, 0.125)
    torch.library.opcheck(_separate_backward, (do, q, k, v, o, lse, 0.125))


def test_compiles_in_one_graph(reduction):
    inputs, do = cases.draw(SPLIT, DEVICE)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    o = compiled(*inputs, implementation="separate")
    gradients = torch.autograd.grad(o, inputs, do)
    for a, b in zip((o, *gradients), cases.run(inputs, do, "separate"), strict=True):
        assert max_abs_error(a, b) == 0 and a.stride() == b.stride()


def bad_inputs():
    x = torch.zeros(1, 2, 8, 64)
    yield "q has shape", (x[0], x, x)
    yield "head_dim is 48", (x[..., :48], x[..., :48], x[..., :48])
    yield "k is torch.float32 and q is torch.bfloat16", (x.bfloat16(), x, x)
    yield "q is torch.float64", (x.double(), x.double(), x.double())
    yield "n_k is 0", (x, x[:, :, :0], x[:, :, :0])
    yield "they must be equal", (x, x, x[:, :, :4])
    yield "agree in batch, heads", (x, x[:, :1], x[:, :1])
    yield "last dimension must be contiguous", (x, x.mT.contiguous().mT, x)
    yield "k is on meta", (x, x.to("meta"), x)


@pytest.mark.parametrize("message, inputs", list(bad_inputs()), ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("implementation", ["separate", "sdpa_flash"])
def test_bad_input_is_one_sentence(implementation, message, inputs):
    with pytest.raises(ValueError, match=message):
        attention(*inputs, implementation=implementation)


def test_bad_scale_and_unknown_implementation():
    x = torch.zeros(1, 2, 8, 64)
    for scale in (-1.0, 0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"scale is {scale}"):
            attention(x, x, x, scale=scale, implementation="separate")
    with pytest.raises(ValueError, match="unknown implementation 'sdpa_flsh'"):
        attention(x, x, x, implementation="sdpa_flsh")


@pytest.mark.skipif(DEVICE.type == "cuda", reason="has a CUDA device")
def test_an_implementation_that_cannot_run_says_why():
    x = torch.zeros(1, 2, 8, 64)
    with pytest.raises(RuntimeError, match="'sdpa_cudnn' cannot run here: cuDNN needs a CUDA"):
        attention(x, x, x, implementation="sdpa_cudnn")
    assert registry.get("attention", "separate").unsupported(DEVICE, torch.bfloat16) is None
