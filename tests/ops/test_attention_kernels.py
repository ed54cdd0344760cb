"""Every kernel, called directly: float64, batches of different n_context, controls.

On the CPU the portable ones are interpreted, and those for Hopper skipped.
"""

import json
from dataclasses import asdict, dataclass, replace
from types import ModuleType

import pytest
import torch

from tests.dtypes import DTYPES, FLOAT32
from tnp.gates import attention_cases as cases
from tnp.gates import rounding
from tnp.gates.attention_cases import BUDGETS, Case
from tnp.gates.checks import OUTPUT_BUDGET, distance, error_ratio, max_abs_error
from tnp.ops.attention import (
    few_keys,
    hopper_backward,
    hopper_forward,
    triton_backward,
    triton_forward,
)
from tnp.ops.attention.kernels import Problem
from tnp.ops.attention.primitives import LOG2_E
from tnp.ops.attention.reference import attention_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.125
# 16 bits on a GPU, so that all kernels serve it.
BATCH = Case(3, 1, 67, 60, dtype=torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
COUNTS = [1, 60, 40]


@dataclass(frozen=True)
class Kernels:
    """A forward and a backward pass of the modules, with their default configurations."""

    forward: ModuleType
    backward: ModuleType
    operation: str

    def run(self, q, k, v, do, n_context=None) -> tuple[torch.Tensor, ...]:
        """o, dq, dk, dv; skips the test where the kernels do not serve the problem."""
        inputs = (q, k, v)
        config = self._default(self.forward, "forward", "forward_configs", inputs)
        o, lse = self.forward.forward(*inputs, n_context, SCALE, config)
        name = f"backward_{self.operation}"
        config = self._default(self.backward, self.operation, f"{name}_configs", inputs)
        backward = getattr(self.backward, name)
        return o, *backward(do, *inputs, o, lse, n_context, SCALE, config)

    def _default(self, module, operation, configs, inputs):
        problem = Problem.of(operation, *inputs)
        if reason := module.unsupported(problem):
            pytest.skip(reason)
        return getattr(module, configs)(problem)[0]


KERNELS = {
    "separate": Kernels(triton_forward, triton_backward, "separate"),
    "fused": Kernels(triton_forward, triton_backward, "fused"),
    "few_keys": Kernels(few_keys, few_keys, "fused"),
    "hopper separate": Kernels(hopper_forward, hopper_backward, "separate"),
    "hopper fused": Kernels(hopper_forward, hopper_backward, "fused"),
}


@pytest.fixture(params=KERNELS)
def kernels(request) -> Kernels:
    return KERNELS[request.param]


def draw(case: Case) -> list[torch.Tensor]:
    """q, k, v, views of one projection, and do."""
    inputs, do = cases.draw(case, DEVICE)
    return [*(x.detach() for x in inputs), do]


def counts(*n_context: int) -> torch.Tensor:
    return torch.tensor(n_context, dtype=torch.int32, device=DEVICE)


def reference(q, k, v, do, n_context=None, dtype=torch.float64) -> list[torch.Tensor]:
    """o, dq, dk, dv in `dtype`, each sample with its own keys alone."""
    samples = []
    for b, n_keys in enumerate([k.shape[2]] * len(q) if n_context is None else n_context.tolist()):
        inputs = [x[b].to(dtype).requires_grad_() for x in (q, k, v)]
        o = attention_reference(inputs[0], *(x[:, :n_keys] for x in inputs[1:]), SCALE)
        samples.append((o.detach(), *torch.autograd.grad(o, inputs, do[b].to(dtype))))
    return [torch.stack(heads) for heads in zip(*samples, strict=True)]


def ratios(outs, inputs, n_context=None) -> dict[str, float]:
    own = reference(*inputs, n_context, dtype=inputs[0].dtype)
    exact = reference(*inputs, n_context)
    floors = rounding.attention(*inputs, SCALE, None if n_context is None else n_context.tolist())
    results = zip(BUDGETS, outs, own, exact, strict=True)
    return {name: error_ratio(*tensors, floors[name]) for name, *tensors in results}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_q, n_k", [(1, 65), (63, 2), (64, 127), (65, 64), (127, 63)])
def test_within_budgets(kernels, n_q, n_k, dtype):
    inputs = draw(Case(1, 2, n_q, n_k, dtype=dtype))
    for name, ratio in ratios(kernels.run(*inputs), inputs).items():
        assert ratio <= BUDGETS[name], name


@pytest.mark.parametrize("n_context", [None, [1, 1]])
def test_one_key_is_its_value_and_has_no_gradient_to_q_and_k(kernels, n_context):
    inputs = draw(Case(2, 2, 63, 1 if n_context is None else 5, dtype=torch.float32))
    n_context = None if n_context is None else counts(*n_context)
    exact = reference(*inputs, n_context)
    for out, expected in zip(kernels.run(*inputs, n_context), exact, strict=True):
        assert max_abs_error(out, expected) <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_k, n_context", [(2, [1, 2]), (64, [64, 63]), (127, [1, 65])])
def test_a_sample_has_its_own_keys(kernels, n_k, n_context, dtype):
    inputs = draw(Case(2, 2, 65, n_k, dtype=dtype))
    outs = kernels.run(*inputs, counts(*n_context))
    for name, ratio in ratios(outs, inputs, counts(*n_context)).items():
        assert ratio <= BUDGETS[name], name
    for gradient in outs[2:]:
        for b, n_keys in enumerate(n_context):
            assert (gradient[b, :, n_keys:] == 0).all()


@pytest.mark.parametrize("dtype", [FLOAT32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 32, 128])
def test_head_dims(kernels, head_dim, dtype):
    inputs = draw(Case(2, 1, 70, 40, head_dim, dtype))
    n_context = counts(40, 17)
    for name, ratio in ratios(kernels.run(*inputs, n_context), inputs, n_context).items():
        assert ratio <= BUDGETS[name], name


def test_all_keys_counted_is_not_counting(kernels):
    inputs = draw(BATCH)
    counted = kernels.run(*inputs, counts(60, 60, 60))
    assert all(map(torch.equal, counted, kernels.run(*inputs)))


def test_counts_are_clamped_to_the_keys_there_are(kernels):
    inputs = draw(BATCH)
    wild = kernels.run(*inputs, counts(-7, 2**30, 40))
    assert all(map(torch.equal, wild, kernels.run(*inputs, counts(1, 60, 40))))


@pytest.mark.parametrize("n_k, n_context", [(BATCH.n_k, COUNTS), (200, [1, 200, 130])])
def test_padding_changes_nothing(kernels, n_k, n_context):
    q, k, v, do = draw(replace(BATCH, n_k=n_k))
    garbage = [x.clone() for x in (k, v)]
    for x in garbage:
        for b, n_keys in enumerate(n_context):
            x[b, :, n_keys:] = 1e30
    clean, padded = (kernels.run(q, *kv, do, counts(*n_context)) for kv in ((k, v), garbage))
    assert all(map(torch.equal, padded, clean))


@pytest.mark.parametrize("n_context", [None, COUNTS])
def test_every_element_is_written(kernels, n_context, monkeypatch):
    empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def poisoned(self, *size, **options):
        out = empty(self, *size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    inputs = draw(BATCH)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x: empty_like(x).fill_(float("nan")))
    for out in kernels.run(*inputs, None if n_context is None else counts(*n_context)):
        assert out.isfinite().all()


def test_two_runs_are_bit_equal(kernels):
    inputs = draw(Case(2, 2, 130, 63))
    first, again = (kernels.run(*inputs, counts(63, 20)) for _ in range(2))
    assert all(map(torch.equal, first, again))


def test_views_of_a_projection_are_read_in_place(kernels):
    """Rows past the slice are NaN: a kernel that reads one shows it."""
    rows = torch.full((2, 100, 4, 3, 64), float("nan"), device=DEVICE)
    rows[:, :67] = torch.randn(2, 67, 4, 3, 64, device=DEVICE)
    q, k, v, do = rows.permute(2, 0, 3, 1, 4)
    views = [q[:, :, :67], k[:, :, :41], v[:, :, :41], do[:, :, :67]]
    copies = [x.contiguous() for x in views]
    assert not any(x.is_contiguous() for x in views)
    assert all(map(torch.equal, kernels.run(*views), kernels.run(*copies)))


def test_gradients_are_laid_out_as_the_projections_read_them(kernels):
    for out in kernels.run(*draw(BATCH)):
        assert out.transpose(1, 2).is_contiguous()


@pytest.mark.blas
@pytest.mark.parametrize("magnitude", [0.0, 8.0, 12.0, 30.0, 40.0])
def test_from_all_equal_to_one_dominating_score(kernels, magnitude):
    inputs = draw(Case(2, 1, 70, 40, dtype=torch.float32, magnitude=magnitude))
    outs = kernels.run(*inputs, counts(40, 33))
    for name, ratio in ratios(outs, inputs, counts(40, 33)).items():
        assert ratio <= BUDGETS[name], name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_k, magnitude", [(11, 12.0), (3, 30.0), (1, 1.0)])
def test_few_keys_of_which_one_has_all_the_weight(kernels, n_k, magnitude, dtype):
    """The true dq and dk all but vanish: what float32 leaves of equal terms is no fault."""
    inputs = draw(Case(2, 2, 70, n_k, dtype=dtype, magnitude=magnitude))
    for name, ratio in ratios(kernels.run(*inputs), inputs).items():
        assert ratio <= BUDGETS[name], name


@pytest.mark.blas
@pytest.mark.parametrize("forward", [triton_forward, few_keys])
@pytest.mark.parametrize("magnitude", [0.0, 1.0, 8.0, 30.0])
def test_lse(forward, magnitude):
    q, k, v, do = draw(Case(2, 2, 70, 40, dtype=torch.float32, magnitude=magnitude))
    config = forward.forward_configs(Problem.of("forward", q, k))[0]
    _o, lse = forward.forward(q, k, v, counts(40, 33), SCALE, config)
    floor = rounding.attention(q, k, v, do, SCALE, (40, 33))["lse"]
    scores = SCALE * q.double() @ k.double().mT
    scores[1, :, :, 33:] = float("-inf")
    assert distance(lse / LOG2_E, scores.logsumexp(-1)) <= OUTPUT_BUDGET * floor


def test_scores_far_below_zero(kernels):
    """Keys past a ragged end score 0: against these, a probability of 2⁷³⁸ if it were let in."""
    q, k, v, do = draw(Case(2, 2, 33, 20, dtype=torch.float32))
    inputs = (q * 0.01 + 8, k * 0.01 - 8, v, do)
    outs, exact = kernels.run(*inputs, counts(20, 7)), reference(*inputs, counts(20, 7))
    for out, expected in zip(outs, exact, strict=True):
        assert max_abs_error(out, expected) <= 1e-3


def one_key_too_many(kernels, inputs, n_context):
    return kernels.run(*inputs, n_context + 1)


def padding_attended(kernels, inputs, n_context):
    return kernels.run(*inputs)


def samples_swapped(kernels, inputs, n_context):
    return kernels.run(*inputs, n_context.flip(0))


@pytest.mark.parametrize("wrong", [one_key_too_many, padding_attended, samples_swapped])
def test_negative_controls_fail(kernels, wrong):
    inputs, n_context = draw(Case(2, 2, 70, 40)), counts(12, 30)
    for name, ratio in ratios(wrong(kernels, inputs, n_context), inputs, n_context).items():
        assert ratio > 5 * BUDGETS[name], name


def last_key_dropped(inputs):
    q, k, v, do = inputs
    return q, k[:, :, :-1], v[:, :, :-1], do


def scale_off_by_a_thousandth(inputs):
    q, k, v, do = inputs
    return q * 1.001, k, v, do


def output_gradient_of_the_next_row(inputs):
    q, k, v, do = inputs
    return q, k, v, do.roll(1, 2)


# What each must turn red. Where one key has all the weight, a scale moves hardly anything, and dq
# and dk vanish. dv sees a scale less than o does: its floor is that of the weights.
@pytest.mark.parametrize(
    "wrong, n_k, magnitude, named",
    [
        (last_key_dropped, 40, 8.0, ("o", "dq", "dk", "dv")),
        (last_key_dropped, 40, 30.0, ("o", "dv")),
        (last_key_dropped, 3, 30.0, ("o", "dv")),
        (scale_off_by_a_thousandth, 40, 8.0, ("o", "dq", "dk")),
        (scale_off_by_a_thousandth, 40, 30.0, ("o",)),
        (output_gradient_of_the_next_row, 40, 8.0, ("dq", "dk", "dv")),
        (output_gradient_of_the_next_row, 40, 30.0, ("dq", "dk", "dv")),
    ],
)
def test_negative_controls_fail_where_the_floor_is_the_budget(
    kernels, wrong, n_k, magnitude, named
):
    inputs = draw(Case(2, 1, 70, n_k, dtype=torch.float32, magnitude=magnitude))
    outs = list(kernels.run(*wrong(inputs)))
    for i in (2, 3):  # a key that was dropped has no gradient
        outs[i] = torch.nn.functional.pad(outs[i], (0, 0, 0, n_k - outs[i].shape[2]))
    found = ratios(outs, inputs)
    for name in named:
        assert found[name] > 2 * BUDGETS[name], name


@pytest.mark.parametrize("n_k, magnitude", [(40, 8.0), (3, 30.0)])
def test_a_delta_of_zero_fails_where_the_floor_is_the_budget(n_k, magnitude):
    """ds = p dp in place of p (dp − delta): where one key has all the weight, dq and dk show it."""
    inputs = draw(Case(2, 1, 70, n_k, dtype=torch.float32, magnitude=magnitude))
    q, k, v, do = inputs
    config = triton_forward.forward_configs(Problem.of("forward", q, k))[0]
    o, lse = triton_forward.forward(q, k, v, None, SCALE, config)
    config = triton_backward.backward_separate_configs(Problem.of("separate", q, k))[0]
    no_o = torch.zeros_like(o)
    gradients = triton_backward.backward_separate(do, q, k, v, no_o, lse, None, SCALE, config)
    found = ratios((o, *gradients), inputs)
    assert found["dq"] > 5 * BUDGETS["dq"] and found["dk"] > 5 * BUDGETS["dk"]
    assert found["dv"] <= BUDGETS["dv"]


def test_split_reduction_is_the_single_pass(monkeypatch):
    """A segment a tile: dk and dv of the portable kernels through float32 partials."""
    inputs = draw(Case(3, 1, 67, 60, dtype=torch.float32))
    n_context = counts(*COUNTS)
    whole = KERNELS["separate"].run(*inputs, n_context)
    segments, sum_partials = [], triton_backward.sum_partials

    def counted(partials, dk, dv):
        segments.append(len(partials))
        sum_partials(partials, dk, dv)

    monkeypatch.setattr(triton_backward, "MIN_SEGMENT_TILES", 1)
    monkeypatch.setattr(triton_backward, "sum_partials", counted)
    split, again = (KERNELS["separate"].run(*inputs, n_context) for _ in range(2))
    assert segments == [3, 3]
    assert all(map(torch.equal, split, again))
    for a, b in zip(split, whole, strict=True):
        assert max_abs_error(a, b) <= 1e-5 and a.stride() == b.stride()


def test_configurations_survive_json():
    for operation in ("forward", "separate", "fused"):
        problem = Problem(operation, torch.bfloat16, 4, 8, 11_000, 10_000, 64, 90)
        module = triton_forward if operation == "forward" else triton_backward
        name = "forward" if operation == "forward" else f"backward_{operation}"
        configs = getattr(module, f"{name}_configs")(problem)
        assert len(set(configs)) == len(configs) > 1
        for config in configs:
            assert type(config)(**json.loads(json.dumps(asdict(config)))) == config
