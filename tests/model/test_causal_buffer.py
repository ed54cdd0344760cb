"""Compares the causal buffer with the computation in full under a mask."""

from dataclasses import replace

import pytest
import torch

from tests.buffers import F64, LENGTHS, ROOM, WITH, assert_equal, exact, lengths, task_of, with_role
from tests.model.test_prediction import in_units
from tests.model.test_transformer_np import CONFIG, build, make_task
from tests.refusals import assert_refused
from tnp.dispatch import devices as targets
from tnp.dispatch import spec as contract
from tnp.gates.buffer import in_training, masked_log_density, masked_loss, one_by_one
from tnp.model import layers
from tnp.model.causal_buffer import Buffer, log_densities
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.ops.kv_cache import append_kernel
from tnp.ops.mixture_nll import mixture_nll
from tnp.tasks.gaussian_process import GaussianProcessTasks
from tnp.tasks.task import Context, Task
from tnp.train.step import TrainingStep
from tnp.util import tensor_archive

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@lengths
@pytest.mark.parametrize("skip_unread", [False, True])
@pytest.mark.parametrize("recompute_above", [None, 1])
def test_the_density_of_one_pass_is_that_under_the_mask(lengths, skip_unread, recompute_above):
    spec = {"skip_unread": skip_unread, "recompute_above": recompute_above}
    model, task = exact(**spec), task_of(ROOM + 1, lengths)
    expected = masked_log_density(model, task)
    with torch.no_grad():
        assert_equal(one_by_one(model, task), expected)
    assert_equal(log_densities(model, task.context, task.x_target, task.y_target), expected)
    assert_equal(model.joint_log_density(task), expected.sum(1))


def test_more_dimensions_than_one():
    config = TNPConfig(2, 3, d_model=32, n_layers=1, n_heads=2, d_ff=21, n_components=2, buffer=4)
    model, task = exact(config), task_of(5, LENGTHS, config)
    with torch.no_grad():
        expected = masked_log_density(model, task)
        assert_equal(one_by_one(model, task), expected)
    assert_equal(model.joint_log_density(task), expected.sum(1))


@lengths
@pytest.mark.parametrize("n_target", [2, 3, 5, 6, 13, 14])
def test_the_training_loss_and_its_gradients_are_those_under_the_mask(lengths, n_target):
    task = task_of(n_target, lengths)
    model, other = exact(), exact(skip_unread=True)
    loss = other.loss(task)
    loss.backward()
    expected = masked_loss(model, task)
    expected.backward()
    assert_equal(loss, expected)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, atol=1e-12, rtol=1e-10, msg=name)


@pytest.mark.parametrize("n_target, room", [(500, 128), (500, 16), (12, 3), (2, 5)])
def test_half_of_the_targets_see_the_buffer_and_each_prefix_as_often(n_target, room):
    entering, seen = in_training(n_target, room)
    n = min(room, n_target // 2)
    counts = [seen.count(i) for i in range(n + 1)]
    assert len(entering) == n and set(counts[1:]) == {n_target // (2 * n)}
    assert sum(counts[1:]) <= n_target / 2 < sum(counts[1:]) + n
    assert all(place < at for at, n_seen in enumerate(seen) for place in entering[:n_seen])


def test_what_stands_in_padding_reaches_no_loss_and_no_gradient():
    found = []
    for fill in (float("nan"), 3.0):
        task = task_of(9)
        for x, n in ((task.x_context, 4), (task.y_context, 4), (task.x_target, 5)):
            x[1, n:] = fill
        task.y_target[1, 5:] = fill
        many = replace(
            task, context_lengths=LENGTHS, target_lengths=torch.tensor([9, 5], dtype=torch.int32)
        )
        model = exact()
        loss = model.loss(many)
        loss.backward()
        found.append([loss, model.joint_log_density(many)] + [p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all() and torch.equal(one, other)


@lengths
def test_a_density_of_several_runs_is_the_sum_of_theirs(lengths):
    """Behind a run its targets join the context; a run of one is a prediction."""
    model, task = exact(), task_of(2 * (ROOM + 1) + 1, lengths)
    targets = torch.tensor([9, 6], dtype=torch.int32)
    found = model.joint_log_density(replace(task, target_lengths=targets))
    for b in range(2):
        m, n = (7 if lengths is None else int(lengths[b])), int(targets[b])
        x = torch.cat([task.x_context[b : b + 1, :m], task.x_target[b : b + 1, :n]], 1)
        y = torch.cat([task.y_context[b : b + 1, :m], task.y_target[b : b + 1, :n]], 1)
        expected = 0.0
        for first in range(0, n, ROOM + 1):
            at, end = m + first, m + min(n, first + ROOM + 1)
            run = Task(x[:, :at], y[:, :at], x[:, at:end], y[:, at:end])
            expected = expected + masked_log_density(model, run).sum()
        assert_equal(found[b], expected)


@pytest.mark.parametrize("config", [CONFIG, WITH])
def test_a_density_without_the_buffer_is_that_of_predictions_which_encode_anew(config):
    model = build(config, **F64).double()
    task, expected = task_of(3), 0.0
    for i in range(3):
        x = torch.cat([task.x_context, task.x_target[:, :i]], 1)
        y = torch.cat([task.y_context, task.y_target[:, :i]], 1)
        one = slice(i, i + 1)
        prediction = model.predict(Context(x, y), task.x_target[:, one])
        expected = expected + prediction.log_prob(task.y_target[:, one])[:, 0]
    assert_equal(model.joint_log_density(task, buffer=False), expected)


def test_a_later_point_changes_no_earlier_density():
    model, task = exact(), task_of(ROOM + 1)
    before = log_densities(model, task.context, task.x_target, task.y_target)
    for i in range(ROOM + 1):
        x, y = task.x_target.clone(), task.y_target.clone()
        y[:, i] += 1.0
        x[:, i] += i == ROOM  # whose y nobody sees but its own density
        after = log_densities(model, task.context, x, y)
        assert torch.equal(after[:, :i], before[:, :i])
        assert (after[:, i:] - before[:, i:]).abs().min() > 1e-9


def test_a_context_is_a_set_behind_a_buffer_too():
    model, task = exact(), task_of(ROOM + 1)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    permuted = replace(task, x_context=task.x_context[:, order], y_context=task.y_context[:, order])
    found = model.joint_log_density(task)
    assert_equal(model.joint_log_density(permuted), found)
    # The control: the buffer is a sequence.
    order = [1, 0, 2, 3]
    other = replace(task, x_target=task.x_target[:, order], y_target=task.y_target[:, order])
    assert (model.joint_log_density(other) - found).abs().max() > 1e-9


@lengths
def test_an_empty_buffer_predicts_as_the_plain_model(lengths):
    plain, model, task = build(**F64).double(), exact(), task_of(1, lengths)
    if lengths is None:  # one target is trained on without the buffer
        parameters = model(task.x_context, task.y_context, task.x_target)
        assert_equal(model.loss(task), mixture_nll(parameters, task.y_target))
    encoding = model.encode(task.context)
    expected = plain.predict(task.context, task.x_target)
    assert torch.equal(model.predict(encoding, task.x_target).mean, expected.mean)
    with torch.no_grad():
        found = Buffer(model, encoding, 0).predict(task.x_target)
    assert_equal(found.mean, expected.mean)
    assert_equal(found.variance, expected.variance)


def test_a_model_is_saved_with_its_buffer_and_one_without_is_what_it_was(tmp_path):
    assert TNPConfig().buffer is None
    plain, model, task = build(), build(WITH), make_task()
    weights = model.state_dict()
    assert not weights.pop("embed.role").any()
    assert weights.keys() == plain.state_dict().keys()
    assert all(torch.equal(x, weights[name]) for name, x in plain.state_dict().items())
    plain.save(tmp_path)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    del state["config"]["buffer"]  # as it was written before
    tensor_archive.save(tmp_path / "model.pt", state)
    assert TransformerNP.load(tmp_path, plain.variant).config == CONFIG
    with_role(model).save(tmp_path)
    found = TransformerNP.load(tmp_path, model.variant)
    assert found.config == WITH and torch.equal(found.loss(task), model.loss(task))


def test_gradients_by_differences():
    config = TNPConfig(d_model=4, n_layers=2, n_heads=1, d_ff=3, n_components=2, buffer=2)
    model, task = exact(config, skip_unread=True), task_of(5, LENGTHS)
    names, weights = zip(*model.named_parameters(), strict=True)
    start = [p.detach().clone().requires_grad_() for p in weights]

    def of(what):
        def value(*given):
            with torch.nn.utils.stateless._reparametrize_module(
                model, dict(zip(names, given, strict=True))
            ):
                return what()

        return value

    assert torch.autograd.gradcheck(of(lambda: model.loss(task)), start, fast_mode=True)
    few = replace(task, x_target=task.x_target[:, :4], y_target=task.y_target[:, :4])
    assert torch.autograd.gradcheck(of(lambda: model.joint_log_density(few)), start, fast_mode=True)


def test_a_step_sends_two_rows_through_the_model(monkeypatch):
    """The point that has entered and the target; of the last block the target alone."""
    model, task = exact(), task_of(ROOM + 1)
    encoding, rows = model.encode(task.context), []
    known = Buffer(model, encoding, ROOM)
    for index, block in enumerate(model.blocks):
        run = block.mlp.of_few
        monkeypatch.setattr(
            block.mlp,
            "of_few",
            lambda h, update, index=index, run=run: (
                rows.append((index, h.shape[1])) or run(h, update)
            ),
        )
    with torch.no_grad():
        known.predict(task.x_target[:, :1])
        known.predict(task.x_target[:, 1:2], (task.x_target[:, :1], task.y_target[:, :1]))
    assert rows == [(0, 1), (1, 1), (0, 2), (1, 1)]


@pytest.mark.parametrize("n_samples", [1, 9])
def test_norms_of_few_rows_go_with_their_products(n_samples, monkeypatch):
    """Checks 16 rows at most: predictions equal those of separate norms and products."""
    model, task, calls = exact(), task_of(ROOM + 1), []
    for block in model.blocks:
        for norm in (block.attention.norm, block.mlp.norm):
            assert norm.with_product is None  # PyTorch's own operators stay
            monkeypatch.setattr(norm, "with_product", "torch")
    run = layers.rms_norm_linear
    monkeypatch.setattr(layers, "rms_norm_linear", lambda *x, **y: calls.append(1) or run(*x, **y))
    known = Buffer(model, model.encode(task.context), ROOM, n_samples)
    x, y = (each.repeat(n_samples, 1, 1) for each in (task.x_target, task.y_target))
    with torch.no_grad():
        found = known.predict(x[:, 1:2], (x[:, :1], y[:, :1])).log_prob(y[:, 1:2])
        assert_equal(found[:2, 0], masked_log_density(model, task)[:, 1])
    # With 36 rows only the last block has few enough behind its attention: 18 are too many.
    assert len(calls) == (2 * len(model.blocks) if n_samples == 1 else 0)


def test_the_role_is_added_in_place_once():
    """A slice that is assigned copies the gradient of all rows twice."""
    model, task = exact(), task_of(4)
    h = model.embed.buffered(task.x_context, task.y_context, ROOM, task.x_target, torch.float64)
    names, nodes = [], [h.grad_fn]
    while nodes:
        node = nodes.pop()
        names.append(type(node).__name__)
        nodes += [one for one, _ in node.next_functions if one is not None]
    assert names.count("CopySlices") == 1


def test_the_loss_is_compiled_whole():
    model, task = exact(replace(WITH, n_layers=1)), task_of(8, LENGTHS)
    torch._dynamo.reset()  # otherwise sizes that varied in another test are symbols, which is slow
    compiled = torch.compile(model.nll, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(*task), model.loss(task))


def test_training_with_a_buffer_learns_what_the_targets_before_say():
    """Targets of a sample are all equal, and the context says nothing of them."""
    config = TNPConfig(d_model=16, n_layers=1, n_heads=1, d_ff=16, n_components=1, buffer=2)
    model, generator = build(config), torch.Generator().manual_seed(0)
    step = TrainingStep(model, learning_rate=2e-2)

    def draw() -> Task:
        x = torch.randn(32, 5, 1, generator=generator)
        y = torch.randn(32, 1, 1, generator=generator).expand(-1, 4, -1)
        return Task(x[:, :1], torch.zeros(32, 1, 1), x[:, 1:], y.clone())

    assert step.n_rows(draw()) == 32 * (1 + 2 + 4)
    for _ in range(100):
        step(draw())
    task = draw()
    alone = model.predict(task.context, task.x_target).log_prob(task.y_target).mean()
    last = log_densities(model, task.context, task.x_target[:, :3], task.y_target[:, :3])[:, 2]
    assert last.mean() > alone + 0.3


def test_units_of_the_users():
    plain, task = with_role(build(WITH)), make_task(n_target=ROOM + 1)
    model, raw = in_units(plain, task)
    log_5 = torch.tensor(5.0).log()
    torch.testing.assert_close(model.loss(raw), plain.loss(task) + log_5)
    expected = plain.joint_log_density(task) - (ROOM + 1) * log_5
    torch.testing.assert_close(model.joint_log_density(raw), expected, atol=1e-4, rtol=1e-5)
    assert model.sample_jointly(raw.context, raw.x_target).mean() > 200


def test_on_gaussian_processes_in_the_default_dtype():
    """By PyTorch's attention, which takes what the buffer asks for on the CPU too."""
    tasks = GaussianProcessTasks()
    model, task = build(WITH, dtype=torch.bfloat16), tasks.sample(0, 0, 2, 20, 10)
    model.loss(task).backward()
    assert model.embed.role.grad.abs().max() > 0
    drawn = model.sample_jointly(task.context, task.x_target, n_samples=2)
    assert drawn.shape == (2, 2, 10, 1) and drawn.isfinite().all()
    in_16_bits, in_32_bits = (
        with_role(build(WITH, dtype=dtype)).joint_log_density(task)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert (in_16_bits - in_32_bits).abs().max() < 10 * 0.1  # nats, of 10 targets


def test_what_cannot_be_is_named():
    model, plain, task = with_role(build(WITH)), build(), make_task()
    x, y = task.x_target[:, :1], task.y_target[:, :1]
    longer = model.encode(Context(*(torch.cat([z, z], 1) for z in task.context[:2])))
    full, known = (Buffer(model, model.encode(task.context), 1) for _ in range(2))
    full.predict(x, (x, y))
    two = tuple(z[:, :2] for z in (task.x_target, task.y_target))
    assert_refused(
        (lambda: full.predict(x, (x, y)), "the buffer is full: it has room for 1 points, and then"),
        (lambda: full.predict(x.repeat(1, 1, 2)), r"x_target is \(2, 1, 2\): it must be \[B, rows"),
        (lambda: known.predict(x, (x.repeat(1, 1, 2), y)), r"x_context is \(2, 1, 2\): it must be"),
        (lambda: known.predict(x, two), r"x is \(2, 2, 1\): it must be \[2, 1, 1\], one point"),
        (lambda: known.predict(x[:1]), r"x_target is \(1, 1, 1\): it must be \[2, 1, 1\], one"),
    )
    known.predict(x, (x, y))  # the point that did not fit has not entered
    none = r"the model has no buffer: TNPConfig\(buffer=…\)"
    centred = {"skip_unread": True, "centred_keys": True}
    assert_refused(
        (lambda: known.refill(longer), "the context has 14 points and there is room for 8"),
        (lambda: Buffer(plain, plain.encode(task.context), 1), none),
        (lambda: plain.sample_jointly(task.context, task.x_target, buffer=True), none),
        (lambda: plain.joint_log_density(task, buffer=True), none),
        *((lambda n=n: TNPConfig(buffer=n), f"buffer is {n}: it must be a whole number")
          for n in (0, -1, 2.5, True)),
        (lambda: build(WITH, pack=True), "variant 'test' packs rows: a model with a buffer"),
        (lambda: build(WITH, **centred), "variant 'test' has centred_keys: a mean of a sample's"),
        (lambda: model.nll(*task.padded(7, 5), capacity=(20, 20)),
         "a capacity is given: a model with a buffer packs no"),
    )  # fmt: skip
    with pytest.raises(TypeError, match="task: number 0 is a Context: all must be a tnp.tasks.T"):
        model.joint_log_density(task.context)
    with pytest.raises(RuntimeError, match="a CUDA graph needs a CUDA device"):
        model.sample_jointly(task.context, task.x_target, cuda_graph=True)


@pytest.mark.parametrize("n_heads, width", [(2, 16), (3, 12), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_entering_point_is_written_where_it_belongs_and_nothing_else(n_heads, width, dtype):
    """As PyTorch writes it; past the last place of a cache nothing is."""
    shape, rows = (4, 2 * n_heads, 9, width), torch.randn(4, 2, 3 * n_heads * width)
    cache, rows = torch.randn(shape).to(DEVICE, dtype), rows.to(DEVICE, dtype)
    lengths = torch.tensor([1, 9, 4, 10], dtype=torch.int32, device=DEVICE)
    expected = cache.clone()
    for b, length in enumerate(lengths[:3].tolist()):
        heads = rows[b, 0, n_heads * width :].view(2 * n_heads, width)
        expected[b, :, length - 1] = heads
    append_kernel.entry(targets.of_device(cache.device), cache, 2)(cache, rows, lengths)
    assert torch.equal(cache, expected)


def test_without_triton_a_buffer_is_written_by_pytorch(monkeypatch):
    entered, entry = [], append_kernel.entry
    monkeypatch.setattr(append_kernel, "entry", lambda *a, **b: entered.append(a) or entry(*a, **b))
    model, task = exact(), task_of(ROOM + 1)
    with torch.no_grad():
        expected = one_by_one(model, task)
        assert len(entered) == (targets.here_without_gpu().kind == "interpreter")
        entered.clear()
        monkeypatch.setattr(contract, "triton_is_installed", lambda: False)
        assert_equal(one_by_one(model, task), expected)
    assert not entered
