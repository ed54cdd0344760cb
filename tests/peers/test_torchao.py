"""Tests what torchao is given and returns, with a stand-in for it, and with it where installed.

The stand-in has the arguments and results of torchao 0.18.0.
"""

import importlib.util
import sys
import types

import pytest
import torch

from tnp.dispatch.devices import CPU, named
from tnp.dispatch.spec import Call
from tnp.ops.mixture_heads import OPERATOR as HEADS
from tnp.ops.mlp import OPERATOR
from tnp.ops.projection import LINEAR, PROJECT_QKV
from tnp_peers import torchao as peers

MLP = peers.MLP
# Taken here: the stand-in stands in its place in the tests that use it.
INSTALLED = importlib.util.find_spec("torchao") is not None


class Config:
    """Stands for Float8LinearConfig, whose recipe's name alone is asked."""

    @classmethod
    def from_recipe_name(cls, name):
        assert name == "tensorwise"
        return cls()


class Float8Linear(torch.nn.Linear):
    @classmethod
    def from_float(cls, mod, config=None):
        assert mod.bias is None
        layer = cls(mod.in_features, mod.out_features, bias=False)
        layer.config, layer.linear_mm_config = config, "products"
        return layer


def convert_to_float8_training(module, config=None):
    """Replaces linear layers, as torchao does in place."""
    for name, child in module.named_children():
        setattr(module, name, Float8Linear.from_float(child, config))
    return module


class Matmul(torch.autograd.Function):
    """Multiplies x @ weight_t, and gives its gradients."""

    @staticmethod
    def forward(ctx, input_hp, weight_hp_t, linear_mm_config, config):
        assert linear_mm_config == "products" and isinstance(config, Config)
        assert input_hp.dtype == weight_hp_t.dtype
        ctx.save_for_backward(input_hp, weight_hp_t)
        return input_hp @ weight_hp_t

    @staticmethod
    def backward(ctx, gradient):
        x, w_t = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        return gradient @ w_t.t(), (flat.t() @ x.reshape(-1, x.shape[-1])).t(), None, None


@pytest.fixture(autouse=True)
def forgotten():
    peers._layer.cache_clear()
    yield
    peers._layer.cache_clear()


@pytest.fixture
def stand_in(monkeypatch):
    modules = {
        "torchao": {},
        "torchao.float8": {
            "Float8LinearConfig": Config,
            "convert_to_float8_training": convert_to_float8_training,
        },
        "torchao.float8.float8_linear": {
            "Float8Linear": Float8Linear, "matmul_with_hp_or_float8_args": Matmul,
        },
    }  # fmt: skip
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def results(run, weights, *others, **options):
    """Returns outputs and the gradients of x [2, 40, 64] and of weights, given by their shapes."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    leaves = [draw(2, 40, 64).bfloat16().requires_grad_()]
    leaves += [(draw(*shape) * shape[-1] ** -0.5).requires_grad_() for shape in weights]
    outputs = run(*leaves, *others, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [draw(*y.shape).to(y.dtype) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, gradients)]


LAYERS = [
    (peers.LINEAR, LINEAR, [(96, 64)], (), {}),
    (peers.PROJECT_QKV, PROJECT_QKV, [(192, 64)], (None, 2), {}),
    (peers.PROJECT_QKV, PROJECT_QKV, [(192, 64)], (None, 2), {"n_q": 24, "n_k": 16}),
    (MLP, OPERATOR, [(96, 64), (64, 96)], (), {}),
    (peers.MIXTURE_HEADS, HEADS, [(3, 96, 64), (3, 3, 96)], (), {}),
]


@pytest.mark.parametrize(("theirs", "operator", "weights", "others", "options"), LAYERS)
def test_weights_are_cast_and_their_gradients_are_float32(
    stand_in, theirs, operator, weights, others, options
):
    found, expected = (
        results(run, weights, *others, **options) for run in (theirs.run, operator.reference)
    )
    assert [x.dtype for x in found[-len(weights) :]] == [torch.float32] * len(weights)
    for one, wanted in zip(found, expected, strict=True):
        assert one.shape == wanted.shape
        torch.testing.assert_close(one, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not INSTALLED, reason="torchao is not installed")
@pytest.mark.parametrize(("theirs", "operator", "weights", "others", "options"), LAYERS)
def test_the_package_rounds_to_8_bits_and_no_further(theirs, operator, weights, others, options):
    found, expected = (
        results(run, weights, *others, **options) for run in (theirs.run, operator.reference)
    )
    errors = [(x.double() - y.double()).norm() / y.double().norm()
              for x, y in zip(found, expected, strict=True)]  # fmt: skip
    # The gradient of a lone layer's weight is a product in 16 bits.
    assert errors[0] > 0.02 and max(errors) < 0.08


def call(dtype="bfloat16", d_ff=1408, gpu="H200") -> Call:
    problem = OPERATOR.problem(dtype, rows=100, d_model=512, d_ff=d_ff)
    return Call(problem, named(gpu) if gpu else CPU, ("x", "up", "down"))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"gpu": "A100"}, "compute capability 8.9 or newer"),
        ({"gpu": None}, "needs a CUDA device"),
        ({"dtype": "float16"}, "it takes bfloat16, not float16"),
        ({"d_ff": 1365}, "it takes multiples of 16 for d_ff, not 1365"),
    ],
)
def test_limits_are_the_packages(asked, reason):
    assert MLP.refuses(call()) is None
    assert reason in MLP.refuses(call(**asked))


def test_it_is_chosen_by_its_name_alone():
    assert not MLP.chosen_from and not MLP.selectable


def test_all_products_are_in_8_bits():
    case = OPERATOR.case("bfloat16", 100, 512, 1408)
    for pass_ in ("forward", "backward"):
        assert MLP.work(case, pass_).flops == {"e4m3": OPERATOR.work(case, pass_).flops["bfloat16"]}
