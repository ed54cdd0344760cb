"""The public function: autograd, compilation, what it refuses. The kernels have their own tests."""

import math
import threading

import pytest
import torch

from tests.ops.opaque import told
from tests.ops.problems import DEVICE, results, setting
from tnp.dispatch import custom_op, plans
from tnp.dispatch.spec import OWN
from tnp.gates.checks import max_abs_error
from tnp.gates.results import Setting
from tnp.ops.attention import OPERATOR, attention

# The forward-only form has tests of its own.
OURS = [
    x.name
    for x in OPERATOR.implementations
    if x.provider == OWN and x.differentiable and x.selectable
]
ours = pytest.mark.parametrize("implementation", OURS)
# Few keys, and many; many of which a sample counts its own.
SHAPES = {"few": (2, 15, None), "many": (1, 140, None), "counted": (2, 140, "9,140")}


def problem(shape: str) -> Setting:
    """In bfloat16."""
    batch, n_k, lengths = SHAPES[shape]
    sizes = {"batch": batch, "n_heads": 2, "n_q": 70, "n_k": n_k, "head_dim": 16}
    drawn = {"lengths": lengths} if lengths else {}
    return setting(OPERATOR, "fused", "bfloat16", drawn, **sizes, n_keys=bool(lengths))


def leaves(of: Setting) -> list[torch.Tensor]:
    """q, k and v, that ask for gradients."""
    return [of.inputs[name].detach().requires_grad_() for name in "qkv"]


def run(inputs, do, implementation: str) -> tuple[torch.Tensor, ...]:
    """o, dq, dk, dv through the public function and autograd."""
    o = attention(*inputs, implementation=implementation)
    return (o.detach(), *torch.autograd.grad(o, inputs, do))


def normal_like(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape, device=DEVICE).to(x.dtype)


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
    far = run([q, k, v], do, implementation)
    near = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    assert all(map(torch.equal, far, run(near, do, implementation)))


@ours
def test_the_backward_runs_from_another_thread(implementation):
    inputs = leaves(problem("many"))
    o = attention(*inputs, implementation=implementation)
    do = normal_like(o)
    gradients = []
    thread = threading.Thread(target=lambda: gradients.extend(torch.autograd.grad(o, inputs, do)))
    thread.start()
    thread.join()
    here = run(inputs, do, implementation)[1:]
    assert len(gradients) == 3
    for gradient, expected in zip(gradients, here, strict=True):
        assert max_abs_error(gradient, expected) <= 1e-2 * expected.abs().max()


@ours
def test_keys_shared_by_all_samples(implementation):
    """Expanded over the batch, of stride 0."""
    q, k, v = (x.detach() for x in leaves(problem("few")))
    k, v = (x[:1].expand_as(x) for x in (k, v))
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
@pytest.mark.parametrize(
    ("shape", "options"), [("few", []), ("many", [["base2", True]]), ("counted", [])], ids=str
)
def test_operators_keep_their_contracts(implementation, shape, options):
    inputs = tuple(problem(shape).inputs.values())
    given = ["n_keys"] if inputs[3] is not None else []
    text = told(implementation, ["q", "k", "v"], options, given)
    op = custom_op.custom_op(OPERATOR)
    (o,), saved = op(*inputs, 0.125, text)
    q, k = inputs[:2]
    sizes = (*q.shape[:3], k.shape[2], q.shape[3])
    arguments = ([torch.ones_like(o)], [*inputs, o], saved, sizes, 0.125, text)
    torch.library.opcheck(torch.ops.tnp.attention_backward.default, arguments)


@pytest.mark.parametrize("shape", SHAPES)
def test_compiles_in_one_graph(shape):
    of = problem(shape)

    def call(q, k, v, n_keys, *_unused):
        return attention(q, k, v, n_keys=n_keys, implementation="fused")

    eager = results(of, call)
    compiled = results(of, torch.compile(call, fullgraph=True, backend="aot_eager"))
    for name, x in eager.items():
        # Of halves of one tensor, as eager calls leave dk and dv, a compiler knows nothing.
        alone = x.clone() if name in ("dk", "dv") else x
        assert compiled[name].stride() == alone.stride()
        assert max_abs_error(compiled[name], x) <= 1e-2 * x.abs().max()


def test_a_plan_says_what_it_runs():
    inputs = *leaves(problem("few")), None, None, None
    plan = plans.build(OPERATOR, "fused", inputs, (), ("q", "k", "v"))
    plan.run(inputs, (0.125,)).sum().backward()
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


@pytest.mark.parametrize("scale", [None, 1e-3])
def test_pytorchs_flash_gives_padding_no_weight_and_no_gradient(scale):
    """It takes no mask: a dimension of the head stands in for it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, n, 16, generator=generator) for n in (11, 9, 9))
    n_keys, found = torch.tensor([9, 4, 1], dtype=torch.int32), []
    for implementation in ("sdpa_flash", "reference"):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        o = attention(*inputs, n_keys=n_keys, scale=scale, implementation=implementation)
        found.append([o, *torch.autograd.grad(o.square().sum(), inputs)])
    for flash, reference in zip(*found, strict=True):
        torch.testing.assert_close(flash, reference)
    for gradient in found[0][2:]:
        assert (gradient[1, :, 4:] == 0).all() and (gradient[2, :, 1:] == 0).all()


def bad_inputs():
    x = torch.zeros(1, 2, 8, 64)
    yield "q has shape", (x[0], x, x)
    yield "k is torch.float32 and q is torch.bfloat16", (x.bfloat16(), x, x)
    yield "q is torch.int64: it must be a float dtype", (x.long(), x.long(), x.long())
    yield "n_k is 0", (x, x[:, :, :0], x[:, :, :0])
    yield "they must be equal", (x, x, x[:, :, :4])
    yield "agree in batch and head_dim", (x, x[..., :32], x[..., :32])
    yield "k has 3 heads and q 2", (x, x[:, [0, 1, 1]], x[:, [0, 1, 1]])
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
    narrow = x[..., :40]
    with pytest.raises(RuntimeError, match=f"{start} head_dim 16, 32, 48, .* 256, not 40"):
        attention(narrow, narrow, narrow, implementation=implementation)
    with pytest.raises(RuntimeError, match=f"{start} bfloat16, float16, float32, not float64"):
        attention(x.double(), x.double(), x.double(), implementation=implementation)


@pytest.mark.parametrize("implementation", [*OURS, "sdpa_flash", "reference"])
@pytest.mark.parametrize("n_k", [40, 300])
def test_queries_that_carry_the_scale(implementation, n_k):
    """Give what their scaled products give, and gradients by the chain rule."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(2, 2, n, 16, generator=generator).to(DEVICE) for n in (33, n_k, n_k, 33)
    )
    factor = math.log2(math.e) / 4
    expected = run([x.requires_grad_() for x in (q, k, v)], do, implementation)
    carrying = (q.detach() * factor).requires_grad_()
    o = attention(carrying, k, v, base2=True, implementation=implementation)
    dq, dk, dv = torch.autograd.grad(o, (carrying, k, v), do)
    for found, right in zip((o, dq * factor, dk, dv), expected, strict=True):
        assert max_abs_error(found, right) <= 1e-5 * right.abs().max()


def test_bad_scale_and_unknown_implementation():
    x = torch.zeros(1, 2, 8, 64)
    with pytest.raises(ValueError, match="scale is 0.5 and base2 is set"):
        attention(x, x, x, scale=0.5, base2=True)
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
