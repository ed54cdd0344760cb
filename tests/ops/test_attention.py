"""The public function: autograd, compilation, what it refuses. The kernels have their own tests."""

import json
import threading

import pytest
import torch

from tests.dtypes import DTYPES
from tnp import dispatch, opaque, plans
from tnp.contract import OWN
from tnp.gates import attention_cases as cases
from tnp.gates.attention_cases import BUDGETS, Case
from tnp.gates.checks import error_ratio, max_abs_error
from tnp.ops.attention import OPERATOR, attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEW, MANY = Case(2, 2, 70, 15, 16), Case(1, 2, 70, 140, 16)
COUNTED = Case(2, 2, 70, 140, 16, n_keys=(9, 140))
OURS = [own.name for own in OPERATOR.implementations if own.provider == OWN]
ours = pytest.mark.parametrize("implementation", OURS)


def ratios(case: Case, outs, inputs, do) -> dict[str, float]:
    """`error_ratio` of o, dq, dk, dv."""
    own, exact = cases.pytorch_own(case, inputs, do), cases.reference(case, inputs, do)
    floors = cases.floors(case, inputs, do)
    results = zip(BUDGETS, outs, own, exact, strict=True)
    return {name: error_ratio(*tensors, floors[name]) for name, *tensors in results}


def assert_within_budgets(case: Case, implementation: str) -> None:
    inputs, do = cases.draw(case, DEVICE)
    outs = cases.run(inputs, do, implementation, cases.n_keys(case, DEVICE))
    for name, ratio in ratios(case, outs, inputs, do).items():
        assert ratio <= BUDGETS[name], name


@ours
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_q, n_k", [(1, 65), (64, 64), (65, 129), (63, 2)])
def test_within_budgets(implementation, n_q, n_k, dtype):
    assert_within_budgets(Case(1, 2, n_q, n_k, dtype=dtype), implementation)


@ours
def test_a_sample_has_its_own_keys(implementation):
    assert_within_budgets(COUNTED, implementation)


def last_keys_dropped(q, k, v):
    return attention(q, k[:, :, :64], v[:, :, :64], implementation="separate")


def scale_missing(q, k, v):
    return attention(q, k, v, scale=1.0, implementation="separate")


def values_shifted_by_a_row(q, k, v):
    return attention(q, k, v.roll(1, 2), implementation="separate")


@pytest.mark.parametrize("wrong", [last_keys_dropped, scale_missing, values_shifted_by_a_row])
def test_negative_controls_fail(wrong):
    case = Case(1, 2, 130, 100)
    inputs, do = cases.draw(case, DEVICE)
    o = wrong(*inputs)
    outs = (o, *torch.autograd.grad(o, inputs, do))
    for name, ratio in ratios(case, outs, inputs, do).items():
        assert ratio > 5 * BUDGETS[name], name


@ours
def test_offsets_pass_32_bits(implementation):
    """Rows 2³⁰ elements apart: the third starts where a 32-bit offset turns negative."""
    stride = 2**30
    memory = torch.empty(2 * stride + 3 * 64, dtype=torch.bfloat16, device=DEVICE)
    q, k, v = (
        memory.as_strided((1, 1, 3, 64), (0, 0, stride, 1), 64 * i).normal_().requires_grad_()
        for i in range(3)
    )
    do = torch.randn(1, 1, 3, 64, device=DEVICE).bfloat16()
    far = cases.run([q, k, v], do, implementation)
    near = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    assert all(map(torch.equal, far, cases.run(near, do, implementation)))


@ours
@pytest.mark.parametrize("case", [FEW, MANY], ids=str)
def test_expanded_output_gradient(implementation, case):
    inputs, do = cases.draw(case, DEVICE)
    summed = torch.autograd.grad(attention(*inputs, implementation=implementation).sum(), inputs)
    ones = cases.run(inputs, torch.ones_like(do), implementation)[1:]
    for gradient, expected in zip(summed, ones, strict=True):
        assert max_abs_error(gradient, expected) <= 1e-2 * expected.abs().max()


@ours
def test_the_backward_runs_from_another_thread(implementation):
    inputs, do = cases.draw(MANY, DEVICE)
    o = attention(*inputs, implementation=implementation)
    gradients = []
    thread = threading.Thread(target=lambda: gradients.extend(torch.autograd.grad(o, inputs, do)))
    thread.start()
    thread.join()
    here = cases.run(inputs, do, implementation)[1:]
    assert len(gradients) == 3
    for gradient, expected in zip(gradients, here, strict=True):
        assert max_abs_error(gradient, expected) <= 1e-2 * expected.abs().max()


@ours
def test_keys_shared_by_all_samples(implementation):
    """Expanded over the batch, of stride 0."""
    (q, k, v), _do = cases.draw(Case(2, 2, 70, 140), DEVICE)
    k, v = (x[:1].detach().expand_as(x) for x in (k, v))
    shared = attention(q, k, v, implementation=implementation)
    copied = attention(q, k.contiguous(), v.contiguous(), implementation=implementation)
    assert max_abs_error(shared, copied) <= 1e-2


@ours
def test_no_queries(implementation):
    q, k = torch.zeros(1, 2, 0, 64, device=DEVICE), torch.randn(1, 2, 5, 64, device=DEVICE)
    k.requires_grad_()
    o = attention(q, k, k, implementation=implementation)
    assert o.shape == (1, 2, 0, 64)
    o.sum().backward()
    assert (k.grad == 0).all()


@ours
@pytest.mark.parametrize("case", [FEW, MANY, COUNTED], ids=str)
def test_operators_keep_their_contracts(implementation, case):
    inputs, do = cases.draw(case, DEVICE)
    lengths = cases.n_keys(case, DEVICE)
    told = {"implementation": implementation, "saves": "", "wanted": ["q", "k", "v"]}
    text = json.dumps(told | {"options": [], "dtype": "bfloat16"})
    op = opaque.custom_op(OPERATOR)
    torch.library.opcheck(op, (*inputs, lengths, 0.125, text))
    q, k, v = (x.detach() for x in inputs)
    (o,), saved = op(q, k, v, lengths, 0.125, text)
    sizes = (case.batch, case.n_heads, case.n_q, case.n_k, case.head_dim)
    arguments = ([do], [q, k, v, lengths, o], saved, sizes, 0.125, text)
    torch.library.opcheck(torch.ops.tnp.attention_backward.default, arguments)


@ours
@pytest.mark.parametrize("case", [FEW, MANY, COUNTED], ids=str)
def test_compiles_in_one_graph(implementation, case):
    inputs, do = cases.draw(case, DEVICE)
    lengths = cases.n_keys(case, DEVICE)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    o = compiled(*inputs, n_keys=lengths, implementation=implementation)
    gradients = torch.autograd.grad(o, inputs, do)
    eager = cases.run(inputs, do, implementation, lengths)
    for a, b in zip((o, *gradients), eager, strict=True):
        assert a.stride() == b.stride()
        assert max_abs_error(a, b) <= 1e-2 * b.abs().max()


@pytest.mark.skipif(DEVICE.type == "cpu", reason="CUDA graphs need a CUDA device")
@ours
@pytest.mark.parametrize("case", [FEW, MANY, COUNTED], ids=str)
def test_captures_in_a_cuda_graph(implementation, case):
    inputs, do = cases.draw(case, DEVICE)
    lengths = cases.n_keys(case, DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager = cases.run(inputs, do, implementation, lengths)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = cases.run(inputs, do, implementation, lengths)
        for out in captured:
            out.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, eager, strict=True):
        assert max_abs_error(a, b) <= 1e-2 * b.abs().max()


def test_a_plan_says_what_it_runs():
    inputs, do = cases.draw(FEW, DEVICE)
    plan = plans.build(OPERATOR, "fused", (*inputs, None), (), ("q", "k", "v"))
    plan.run((*inputs, None), (0.125,)).backward(do)
    assert set(plan.choices) == {"attention.forward", "attention.fused"}
    assert {chosen["choice"] for chosen in plan.choices.values()} == {"few_keys"}


def bad_n_keys():
    right = torch.ones(1, dtype=torch.int32)
    yield "n_keys is torch.int64", right.long()
    yield "must be int32 of shape", right.repeat(2)
    yield "n_keys is on meta", right.to("meta")
    yield "it must be a tensor", [8]


@pytest.mark.parametrize("message, n_keys", list(bad_n_keys()))
@pytest.mark.parametrize("implementation", [*OURS, "reference", "sdpa_flash"])
def test_bad_n_keys_is_one_sentence(implementation, message, n_keys):
    x = torch.zeros(1, 2, 8, 64)
    with pytest.raises(ValueError, match=message):
        attention(x, x, x, n_keys=n_keys, implementation=implementation)


def test_n_keys_needs_an_implementation_that_knows_it():
    x, n_keys = torch.zeros(1, 2, 8, 64), torch.ones(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="'sdpa_flash' cannot run here: .* not take n_keys"):
        attention(x, x, x, n_keys=n_keys)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there it is an assertion on the device")
@ours
@pytest.mark.parametrize("wrong", [0, 9])
def test_n_keys_out_of_range_is_clamped_or_found_where_asked_for(
    implementation, wrong, monkeypatch
):
    x, n_keys = torch.randn(1, 2, 8, 64), torch.tensor([wrong], dtype=torch.int32)
    clamped = attention(x, x, x, n_keys=n_keys.clamp(1, 8), implementation=implementation)
    o = attention(x, x, x, n_keys=n_keys, implementation=implementation)
    assert torch.equal(o, clamped)
    monkeypatch.setenv("TNP_CHECK", "1")  # read when a plan is made
    monkeypatch.setattr(dispatch, "of_operator", {})
    monkeypatch.setattr(plans, "of_operator", dispatch.of_operator)
    with pytest.raises(RuntimeError, match="between 1 and n_k = 8"):
        attention(x, x, x, n_keys=n_keys, implementation=implementation)
    o = attention(x, x, x, n_keys=n_keys.clamp(1, 8), implementation=implementation)
    assert torch.equal(o, clamped)


def bad_inputs():
    x = torch.zeros(1, 2, 8, 64)
    yield "q has shape", (x[0], x, x)
    yield "k is torch.float32 and q is torch.bfloat16", (x.bfloat16(), x, x)
    yield "q is torch.int64: it must be a float dtype", (x.long(), x.long(), x.long())
    yield "n_k is 0", (x, x[:, :, :0], x[:, :, :0])
    yield "they must be equal", (x, x, x[:, :, :4])
    yield "agree in batch, heads", (x, x[:, :1], x[:, :1])
    yield "last dimension must be contiguous", (x, x.mT.contiguous().mT, x)
    yield "k is on meta", (x, x.to("meta"), x)


@pytest.mark.parametrize("message, inputs", list(bad_inputs()), ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("implementation", [*OURS, "sdpa_flash"])
def test_bad_input_is_one_sentence(implementation, message, inputs):
    with pytest.raises(ValueError, match=message):
        attention(*inputs, implementation=implementation)


@ours
def test_what_ours_do_not_take_is_one_sentence(implementation):
    x = torch.zeros(1, 2, 8, 64)
    start = f"'{implementation}' cannot run here: it takes"
    with pytest.raises(RuntimeError, match=f"{start} head_dim 16, 32, 64, 128, not 48"):
        attention(x[..., :48], x[..., :48], x[..., :48], implementation=implementation)
    with pytest.raises(RuntimeError, match=f"{start} bfloat16, float16, float32, not float64"):
        attention(x.double(), x.double(), x.double(), implementation=implementation)


def test_bad_scale_and_unknown_implementation():
    x = torch.zeros(1, 2, 8, 64)
    assert torch.equal(attention(x, x, x, scale=1), attention(x, x, x, scale=1.0))
    for scale in (-1.0, 0.0, float("nan"), float("inf"), -1):
        with pytest.raises(ValueError, match=f"scale is {scale}"):
            attention(x, x, x, scale=scale, implementation="separate")
    with pytest.raises(ValueError, match="q has shape"):
        attention(x[0, 0, 0, 0], x, x)
    with pytest.raises(ValueError, match="unknown implementation 'sdpa_flsh'"):
        attention(x, x, x, implementation="sdpa_flsh")


@pytest.mark.skipif(DEVICE.type == "cuda", reason="has a CUDA device")
def test_an_implementation_that_cannot_run_says_why():
    x = torch.zeros(1, 2, 8, 64)
    with pytest.raises(RuntimeError, match="'sdpa_cudnn' cannot run here: cuDNN needs a CUDA"):
        attention(x, x, x, implementation="sdpa_cudnn")
