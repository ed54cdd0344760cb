"""What the kernels for few keys alone do: every configuration, segments, what they refuse."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.ops.problems import DEVICE
from tests.ops.test_attention_kernels import (
    BUDGETS,
    KERNELS,
    SCALE,
    TARGET,
    Case,
    counts,
    draw,
    ratios,
    reference,
    seen,
)
from tnp.dispatch import devices, plans
from tnp.dispatch.spec import Budget, Call
from tnp.gates.checks import distance, error_ratio, max_abs_error
from tnp.ops._shared import rounding_error
from tnp.ops.attention import OPERATOR, few_keys
from tnp.ops.attention.few_keys import BACKWARD, FORWARD, ForwardConfig
from tnp.ops.attention.primitives import LOG2_E, LaunchConfig

FEW = KERNELS["few_keys"]


def call(dtype: str = "bfloat16", gpu: str = "H200", **sizes) -> Call:
    size = {"batch": 64, "n_heads": 8, "n_q": 564, "n_k": 64, "head_dim": 64} | sizes
    return Call(OPERATOR.problem(dtype, **size), devices.named(gpu), OPERATOR.differentiated)


FORWARD_CONFIGS = sorted(
    {config for n_k in few_keys.BLOCKS for config in FORWARD.configs(call(n_k=n_k))}, key=str
)
BACKWARD_CONFIGS = sorted(
    {
        config
        for n_k in (64, 128)
        for gpu in ("A100", "H200")
        for config in BACKWARD.configs(call(n_k=n_k, gpu=gpu))
    },
    key=str,
)


@pytest.mark.parametrize("n_q, n_k", [(1, 64), (63, 128), (64, 64), (65, 64), (127, 128)])
def test_sizes(n_q, n_k):
    inputs = draw(Case(2, 3, n_q, n_k))
    outs = FEW.run(*inputs, counts(n_k, 3))
    for name, ratio in ratios(outs, inputs, counts(n_k, 3)).items():
        assert ratio <= BUDGETS[name], name


@cache
def drawn(n_q: int, n_k: int, ragged: bool) -> tuple:
    """Inputs and n_keys, what they should give in their dtype and in float64, and the floors."""
    inputs, n_keys = draw(Case(2, 1, n_q, n_k)), counts(50, 7) if ragged else None
    own, exact = (reference(*inputs, n_keys, x) for x in (inputs[0].dtype, torch.float64))
    floors = rounding_error.attention(*inputs, SCALE, seen(*inputs[:2], n_keys))
    return inputs, n_keys, own, exact, floors


@pytest.mark.parametrize("config", FORWARD_CONFIGS, ids=str)
@pytest.mark.parametrize("ragged", [True, False])
def test_forward_configurations_are_within_budgets(config: ForwardConfig, ragged: bool):
    """With padding after n_keys, and with a tile that is full of keys, which has no mask."""
    n_q, n_k = (333 if ragged else 70), config.block_n - 3 * ragged
    (q, k, v, _), n_keys, (own, *_), (exact, *_), floors = drawn(n_q, n_k, ragged)
    inputs = (q, k, v, n_keys, None, None)
    forced = {"attention.forward": ("few_keys", config)}
    plan = plans.build(OPERATOR, "separate", inputs, forced=forced)
    (o,), (lse,) = plan.forward(inputs, (SCALE,))
    assert error_ratio(o, own, exact, floors["o"]) <= BUDGETS["o"]
    scores = SCALE * q.double() @ k.double().mT
    for b, length in enumerate(n_keys.tolist() if ragged else [n_k] * 2):
        scores[b, :, :, length:] = float("-inf")
    assert distance(lse / LOG2_E, scores.logsumexp(-1)) <= Budget.outputs * floors["lse"]


@pytest.mark.parametrize("config", BACKWARD_CONFIGS, ids=str)
def test_backward_configurations_are_within_budgets(config: LaunchConfig):
    inputs, n_keys, own, exact, floors = drawn(150, config.block_n - 3, True)
    outs = FEW.run(*inputs, n_keys, config)
    for name, *found in zip(BUDGETS, outs, own, exact, strict=True):
        assert error_ratio(*found, floors[name]) <= BUDGETS[name], name


@pytest.fixture
def segments(monkeypatch) -> list[int]:
    """Of every backward pass with more than one."""
    found, partials = [], few_keys.Partials

    def counted(k, n, whole):
        found.append(n)
        return partials(k, n, whole)

    monkeypatch.setattr(few_keys, "Partials", counted)
    return found


def backward(inputs, config: LaunchConfig, n_keys=None, multiprocessors: int = 132):
    """dq, dk, dv on a GPU of as many multiprocessors."""
    q, k, v, do = inputs
    plan, tensors = FEW.plan(q, k, v, n_keys)
    (o,), saved = plan.forward(tensors, (SCALE,))
    what = replace(plan.what, target=replace(TARGET, multiprocessors=multiprocessors))
    arguments = (do,), (*tensors, o), saved
    return BACKWARD.prepare(what, config, arguments)(arguments, (SCALE,))


def test_segments_add_up_to_the_single_launch(segments):
    """Five tiles in segments of two: the last is short."""
    inputs, n_keys = draw(Case(2, 2, 290, 40, dtype=torch.float32)), counts(40, 9)
    config = LaunchConfig(64, 64, 4, 1)
    split, again = (backward(inputs, config, n_keys) for _ in range(2))
    assert segments == [2, 2]
    assert all(map(torch.equal, split, again))
    whole = backward(inputs, config, n_keys, multiprocessors=2)
    assert segments == [2, 2]
    for a, b in zip(split, whole, strict=True):
        assert max_abs_error(a, b) <= 1e-5 and a.stride() == b.stride()


def test_the_backward_pass_does_not_read_o():
    q, k, v, do = draw(Case(1, 2, 70, 40))
    plan, inputs = FEW.plan(q, k, v)
    (o,), saved = plan.forward(inputs, (SCALE,))
    first, again = (
        plan.backward((do,), (*inputs, x), saved, (SCALE,))
        for x in (o, torch.full_like(o, float("nan")))
    )
    assert all(map(torch.equal, first, again))


def test_an_lse_off_by_a_rounding_does_not_unbalance_a_row():
    """Σ_j ds_j = 0 whatever the scale of p: keys that are all equal leave no gradient to q."""
    q, k, v, do = draw(Case(1, 2, 70, 40, dtype=torch.float32))
    plan, inputs = FEW.plan(q, k[:, :, :1].expand_as(k), v)
    (o,), (lse,) = plan.forward(inputs, (SCALE,))
    dq, _, _ = plan.backward((do,), (*inputs, o), (lse + 0.01,), (SCALE,))
    assert dq.abs().max() <= 1e-4


@pytest.mark.blas
def test_a_gradient_of_expanded_rows():
    q, k, v, _ = draw(Case(1, 2, 70, 40, dtype=torch.float32))
    do = torch.randn(64, device=DEVICE).expand_as(q)
    outs = FEW.run(q, k, v, do)
    for name, ratio in ratios(outs, (q, k, v, do)).items():
        assert ratio <= BUDGETS[name], name


def test_what_they_refuse():
    for kernel in (FORWARD, BACKWARD):
        assert kernel.refuses(call()) is None
        assert kernel.refuses(call(n_k=257)) == "its tile holds 256 keys and there are 257"
        refused = kernel.refuses(call("float32", n_k=128, head_dim=128))
        assert refused == "no tile of 128 keys at head_dim 128 fits the registers"
    assert FORWARD.refuses(call("float32", head_dim=128)) is None
    assert BACKWARD.refuses(call("float32", head_dim=128)) is not None
    assert FORWARD.refuses(call(n_k=256)) is None
    for kernel, gpu in ((BACKWARD, "H200"), (FORWARD, "A100")):
        refused = kernel.refuses(call(n_k=129, gpu=gpu))
        assert refused == "no tile of 129 keys at head_dim 64 fits the registers"
