"""Tests what a training step updates, what it leaves alone, and what it refuses."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch._inductor.exc import OperatorIssue
from torch.optim.swa_utils import AveragedModel
from torch.torch_version import TorchVersion

from tests.model.test_transformer_np import CONFIG, build, make_task
from tests.refusals import assert_refused
from tnp.model.buckets import Buckets
from tnp.model.variants import FAMILIES
from tnp.ops._shared import casting
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep, _check_capturable, _put_rates_on, shorten_inductor_messages
from tnp.train.step_graphs import Watched


def test_loss_is_the_one_before_the_update_and_falls_by_the_learning_rate():
    model, task = build(), make_task()
    before = [p.detach().clone() for p in model.parameters()]
    loss = TrainingStep(model, learning_rate=1.0, update=False)(task)  # it has no optimizer
    assert loss.isfinite() and all(p.grad is not None for p in model.parameters())
    step = TrainingStep(model, learning_rate=1e-2, weight_decay=0.0)
    step.set_learning_rate(0.0)
    torch.testing.assert_close(step(task), loss)
    assert all(map(torch.equal, before, model.parameters()))
    step.set_learning_rate(1e-2)
    losses = [step(task) for _ in range(20)]
    torch.testing.assert_close(losses[0], loss)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("checkpoint", [False, True])
def test_weights_are_cast_once_and_the_step_is_the_same(checkpoint, monkeypatch):
    made, missed, get = [], [], casting.WeightCasts.get
    of = casting._Cast.of

    def counting(self, weight, dtype):
        copy = get(self, weight, dtype)
        missed.extend([weight] * (copy is None))
        return copy

    monkeypatch.setattr(casting.WeightCasts, "get", counting)
    monkeypatch.setattr(casting._Cast, "of", lambda *args: made.append(args[0]) or of(*args))
    ours = dict.fromkeys(("projection", "mlp", "mixture_heads"), "fused")
    task, runs = make_task(), []
    for once in (True, False):
        model = build(dtype=torch.bfloat16, checkpoint=checkpoint, **ours)
        step = TrainingStep(model, learning_rate=1e-2)
        if not once:
            monkeypatch.setattr(step.casts, "step", nullcontext)
        runs.append([step(task) for _ in range(3)] + [p.detach() for p in model.parameters()])
        if once:
            read = [p for p in model.parameters() if p.dim() > 1 and p is not model.embed.input]
    assert len(made) == len(read) and not missed
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_what_a_captured_step_trains_must_stay_where_it_was():
    model, moved = build(), "was moved or replaced"
    step = TrainingStep(model, learning_rate=1e-2)
    step(make_task())
    step_state = step.optimizer.state_dict
    for change, sentence in (
        (lambda: model.load_state_dict(model.state_dict()), None),
        (lambda: setattr(model.embed.output, "data", model.embed.output.data.clone()),
         f"parameter embed.output {moved}"),
        (lambda: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True), moved),
        (lambda: step.optimizer.load_state_dict(step_state()), "optimizer's state was replaced"),
    ):  # fmt: skip
        captured = Watched(model, step.optimizer, step.casts)
        if sentence is None:
            step(make_task())
        change()
        if sentence is None:
            captured.check()
        else:
            with pytest.raises(RuntimeError, match=sentence):
                captured.check()


def test_a_compiled_step_with_checkpoints_is_the_eager_one():
    """`tests/model/test_buckets.py` compiles one without them."""
    task, losses = make_task(), []
    config = replace(CONFIG, n_layers=1, n_components=1)
    for compile in (False, True):
        model = build(config, checkpoint=True, compile=compile)
        step = TrainingStep(model, learning_rate=1e-2)
        losses.append(torch.stack([step(task) for _ in range(3)]))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)


def test_inductors_messages_leave_arguments_alone_before_torch_2_13(monkeypatch):
    class Argument:
        def __str__(self):
            raise AssertionError("was written out")

    def inductors(target, args, kwargs):
        return f"{target} {[str(argument) for argument in args]}"

    monkeypatch.setattr(OperatorIssue, "operator_str", staticmethod(inductors))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    shorten_inductor_messages()
    with pytest.raises(AssertionError, match="written out"):
        OperatorIssue.operator_str("tnp.mlp", [Argument()], {})
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    shorten_inductor_messages()
    assert "tnp.mlp" in OperatorIssue.operator_str("tnp.mlp", [Argument()], {})


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1e-3, "0.1", None])
def test_a_learning_rate_that_trains_nothing_is_refused(rate):
    sentence = f"learning_rate is {rate!r}: it must be (finite and not negative|a number)"
    step = TrainingStep(build(), learning_rate=1e-3)
    assert_refused((lambda: step.set_learning_rate(rate), sentence))
    if rate is not None:
        assert_refused((lambda: TrainingStep(build(), learning_rate=rate), sentence))
    assert step.optimizer.param_groups[0]["lr"] == 1e-3


class DistributedDataParallel(torch.nn.Module):
    """Looks like PyTorch's, which wants a process group."""

    def __init__(self, module):
        super().__init__()
        self.module, self.process_group = module, None


def test_a_model_that_a_step_does_not_train_is_one_sentence():
    """The sentence names what wraps the model, and what to hand over."""

    def train(wrap):
        return lambda: TrainingStep(wrap(build()), learning_rate=1e-3)

    other = "a {}: it must be a TransformerNP: hand over its {}"
    assert_refused(
        (train(torch.compile), other.format("OptimizedModule", "_orig_mod")),
        (train(AveragedModel), other.format("AveragedModel", ".module")),
        (train(torch.nn.DataParallel), other.format("DataParallel", ".module")),
        (train(DistributedDataParallel), "adds up no gradients of other processes, so write that"),
        (train(lambda model: torch.nn.Linear(2, 3)), "a Linear: it must be a TransformerNP$"),
        (train(lambda model: model.requires_grad_(False)), "no parameter of the model asks for a"),
        (train(lambda model: model.compile() or model), "compiled in place, which a step ignores"),
        error=(TypeError, ValueError),
    )


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Muon, torch.optim.Adafactor]
)
def test_padding_changes_no_result_whatever_the_optimizer(optimizer):
    """A padded model refuses optimizers whose updates depend on its shape."""
    losses = []
    for storage in (None, 32):
        model = build(d_ff_storage=storage)
        of_matrices = optimizer([p for p in model.parameters() if p.dim() == 2], lr=1e-2)
        if storage and optimizer in (torch.optim.Muon, torch.optim.Adafactor):
            with pytest.raises(ValueError, match="padded from 21 to 32 units: make the model with"):
                TrainingStep(model, optimizer=of_matrices)
            return
        torch.optim.lr_scheduler.LambdaLR(of_matrices, lambda i: 1.0)  # takes over its step
        step = TrainingStep(model, optimizer=of_matrices)
        assert not of_matrices.state
        losses.append(torch.stack([step(make_task()) for _ in range(5)]))
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)


def test_weights_in_the_padding_are_found_before_training():
    model = build(d_ff_storage=32)
    torch.nn.init.xavier_uniform_(model.blocks[1].mlp.down)
    with pytest.raises(
        ValueError, match="blocks.1.mlp.down holds weights in its padding .units 21"
    ):
        TrainingStep(model, learning_rate=1e-3)
    model = build(d_ff_storage=32)
    torch.nn.utils.parametrizations.weight_norm(model.heads, "up")
    with pytest.raises(
        ValueError, match=r"heads is parametrized, and its padding \(units 21 to 31"
    ):
        TrainingStep(model, learning_rate=1e-3)
    model = build()
    torch.nn.utils.parametrizations.weight_norm(model.heads, "up")
    assert TrainingStep(model, learning_rate=1e-3)(make_task()).isfinite()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_cuda_graph_without_a_gpu_raises():
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        TrainingStep(build(), learning_rate=1e-3, cuda_graph=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ours", [{}, dict.fromkeys(FAMILIES, "fused") | {"skip_unread": True}])
def test_captured_step_follows_new_tasks_and_learning_rates(ours):
    losses = []
    for cuda_graph in (False, True):
        model = build(dtype=torch.bfloat16 if ours else torch.float32, **ours).cuda()
        step = TrainingStep(model, learning_rate=1e-2, cuda_graph=cuda_graph)
        run = []
        for index in range(8):
            step.set_learning_rate(1e-2 / (1 + index))
            generator = torch.Generator().manual_seed(index)
            task = make_task().to("cuda")
            task.y_context.copy_(torch.randn(2, 7, 1, generator=generator))
            run.append(step(task))
        losses.append(torch.stack(run))
    rtol = 2e-2 if ours else 1e-4
    torch.testing.assert_close(losses[1], losses[0], rtol=rtol, atol=1e-5)


def test_gradients_of_several_tasks_are_those_of_one_batch():
    whole, parts = make_task(batch=4), []
    for part in (slice(0, 1), slice(1, 4)):
        parts.append(Task(*(x[part] for x in whole if x is not None)))
    results = []
    for tasks in ([whole], parts):
        model = build()
        loss = TrainingStep(model, learning_rate=1e-2, update=False)(*tasks)
        results.append([loss, *(p.grad for p in model.parameters())])
    for together, apart in zip(*results, strict=True):
        torch.testing.assert_close(apart, together)


def test_any_optimizer_of_pytorch_trains_and_gradients_are_clipped():
    norms = []
    for most in (None, 1e-3, 1e3):
        model = build()
        TrainingStep(model, learning_rate=1e-2, update=False, max_grad_norm=most)(make_task())
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
    torch.testing.assert_close(norms[1], torch.tensor(1e-3), rtol=1e-2, atol=0)
    assert norms[2] == norms[0] > 1e-2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = TrainingStep(model, optimizer=optimizer, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses = []
    for _ in range(5):
        losses.append(step(make_task()))
        schedule.step()
    assert losses[-1] < losses[0] and optimizer.param_groups[0]["lr"] == 0.1 / 32


def test_what_makes_no_step_is_one_sentence():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(**options):
        return lambda: TrainingStep(model, **options)

    either = "give either a learning_rate, which is AdamW's, or an op"
    lbfgs = torch.optim.LBFGS(model.parameters())
    assert_refused(
        (step(), either),
        (step(learning_rate=1.0, optimizer=optimizer), either),
        (step(learning_rate=1.0, max_grad_norm=0.0), "max_grad_norm is 0.0: it must be positive"),
        (lambda: step(optimizer=optimizer)()(), "there is no task to train on: give at least one"),
        (lambda: _check_capturable(optimizer), "SGD cannot be captured in a CUDA graph: make it"),
        (lambda: TrainingStep(build(), optimizer=optimizer), "optimizer has no parameter of the m"),
        (step(optimizer=lbfgs), "LBFGS evaluates the loss several times a step"),
    )
    assert_refused(
        (lambda: step(optimizer=optimizer)()([make_task()]), "number 0 is a list: all must be a"),
        (step(optimizer="adam"), "optimizer is a str: it must be a torch.optim.Optimizer"),
        (step(optimizer=optimizer, buckets=64), "buckets is a int: it must be a Buckets"),
        error=TypeError,
    )


def test_an_optimizers_state_is_loaded_and_runs_as_it_does_here():
    model = build()
    ours = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True, foreach=True)
    step, other = TrainingStep(model, optimizer=ours), TrainingStep(build(), learning_rate=1e-3)
    other(make_task())
    step.load_optimizer(other.optimizer.state_dict())
    (group,) = ours.param_groups
    assert group["capturable"] and group["foreach"] and group["lr"] == 1e-3
    assert ours.state[model.heads.down]["step"] == 1
    group["lr"] = torch.tensor(0.1)
    _check_capturable(ours)
    _put_rates_on(torch.device("meta"), ours)  # where a captured step reads them
    assert group["lr"].is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_steps_of_several_sizes_are_the_eager_ones():
    losses = []
    for cuda_graph in (False, True):
        model = build().cuda()
        buckets = Buckets(max_context=20, max_target=40)
        step = TrainingStep(
            model, learning_rate=1e-2, cuda_graph=cuda_graph, buckets=buckets, max_grad_norm=1.0
        )
        sizes = [(5, 9), (17, 30), (20, 40), (3, 33)] * 4
        run = [step(make_task(n_context=m, n_target=n).to("cuda")) for m, n in sizes]
        losses.append(torch.stack(run))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
