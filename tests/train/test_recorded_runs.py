"""Tests that recorded training learns, resumes exactly, and reads no checkpoint it should not.

`test_loop.py` tests the loop under it: divergence, and states of other models.
"""

import json
import math
import pickle
import random

import pytest
import torch
from torch.distributions import Normal

from tests.refusals import assert_refused
from tnp.model.config import TNPConfig
from tnp.model.prediction import Prediction
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.store.schemas import PROVENANCE, TABLES
from tnp.tasks.gaussian_process import SMOOTH, GaussianProcessTasks
from tnp.train import recorded_runs
from tnp.train.loop import cosine, load_state
from tnp.util import tensor_archive

MANY = recorded_runs.N_HELD_OUT_BATCHES


@pytest.fixture(autouse=True)
def _two_batches_are_held_out(monkeypatch):
    """Tests of what a model has learned use `MANY`."""
    monkeypatch.setattr(recorded_runs, "N_HELD_OUT_BATCHES", 2)


def parameters(**changes) -> dict:
    return {
        "config_id": "test",
        "run": "test",
        "source": "gaussian_process",
        "batch": 8,
        "n_context": 16,
        "n_target": 16,
        "variant": "sdpa_flash",
        "variant_spec": {"attention": "sdpa_flash"},
        "model": {"d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 48, "n_components": 2},
        "dtype": "float32",
        "steps": 6,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "eval_every": 3,
        "seed": 0,
    } | changes


def run(folder, **changes):
    rows = []
    model = recorded_runs.run(parameters(**changes), "cpu", folder, rows.append)
    return rows, model


def without_time(rows):
    return [{key: value for key, value in row.items() if key != "elapsed_s"} for row in rows]


class Killed(Exception):
    pass


def run_killed(folder, step=3, **changes):
    """Ends after a step, when the checkpoint of that step is written."""

    def kill(row):
        if row["step"] == step:
            raise Killed

    with pytest.raises(Killed):
        recorded_runs.run(parameters(**changes), "cpu", folder, kill)


@pytest.mark.parametrize("source", ["gaussian_process", "images"])
def test_a_resumed_run_is_the_unbroken_one(tmp_path, source):
    unbroken, model = run(tmp_path / "unbroken", steps=8, source=source)
    run_killed(tmp_path / "resumed", steps=8, source=source)
    resumed, again = run(tmp_path / "resumed", steps=8, source=source)
    assert without_time(resumed) == without_time(unbroken)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert (resumed[-1]["exact_log_likelihood"] is None) == (source == "images")


def test_a_kill_while_saving_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    run_killed(tmp_path, steps=8)
    before = (tmp_path / "latest.pt").read_bytes()

    def save_half(state, file):
        file.write_bytes(b"half a checkpoint")
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(torch, "save", save_half)
        run(tmp_path, steps=8)
    assert (tmp_path / "latest.pt").read_bytes() == before
    assert run(tmp_path, steps=8)[0][-1]["step"] == 8


@pytest.fixture
def sampled(monkeypatch) -> list[int]:
    """Seeds of all tasks that are drawn."""
    seeds = []

    def sample(self, seed, step, *sizes, original=GaussianProcessTasks.sample):
        seeds.append(seed)
        return original(self, seed, step, *sizes)

    monkeypatch.setattr(GaussianProcessTasks, "sample", sample)
    return seeds


def test_a_finished_run_keeps_weights_and_rows_and_gives_them_again(tmp_path, sampled):
    """Killed between the last step and the moment when the workflow knows that it is done."""
    rows, model = run(tmp_path)
    provenance = {name for name, _ in PROVENANCE} | {"run_id"}
    assert all(row.keys() == set(TABLES["training"].names) - provenance for row in rows)
    final = torch.load(tmp_path / "final.pt", weights_only=True)["model"]
    assert all(torch.equal(weight, final[name]) for name, weight in model.state_dict().items())
    assert not (tmp_path / "latest.pt").exists()
    sampled.clear()
    again, weights = run(tmp_path)
    assert again == rows and sampled.count(0) == 0
    assert all(map(torch.equal, model.parameters(), weights.parameters()))


def test_a_finished_run_starts_again_where_something_has_changed(tmp_path, sampled):
    run(tmp_path)
    final = (tmp_path / "final.pt").read_bytes()
    sampled.clear()
    run_killed(tmp_path, learning_rate=1e-3)
    assert sampled.count(0) == 3
    assert (tmp_path / "final.pt").read_bytes() == final  # until the new one is finished


def test_held_out_tasks_come_from_a_seed_no_run_can_have(tmp_path, sampled):
    largest = 2**31 - 1  # that the column `seed` holds
    run(tmp_path, seed=largest)
    assert sampled.count(largest) == 6
    assert sampled.count(recorded_runs.HELD_OUT_SEED) == recorded_runs.N_HELD_OUT_BATCHES


def test_what_cannot_be_recorded_is_said_before_training(tmp_path, sampled):
    beyond = "is more than table training can hold"
    assert_refused(
        (lambda: run(tmp_path, seed=2**31), f"seed: 2147483648 {beyond}"),
        (lambda: run(tmp_path, seed=2**80), f"seed: 1208925819614629174706176 {beyond}"),
        (lambda: run(tmp_path, steps=2**31), f"step: 2147483648 {beyond}"),
        (lambda: run(tmp_path, source="image"), "'image': choose from gaussian_process"),
    )
    assert not sampled and not list(tmp_path.iterdir())


def test_a_model_with_a_buffer_says_its_joint_likelihood_both_ways(tmp_path):
    """Compares the first held-out batch. A model without a buffer has null."""
    said = parameters()
    rows, model = run(tmp_path / "with", model=said["model"] | {"buffer": 3})
    last = rows[-1]
    task = recorded_runs.sources(said, "cpu")[1].sample(recorded_runs.HELD_OUT_SEED, 0, 8, 16, 16)
    for column, buffer in (("joint_log_likelihood", True), ("joint_log_likelihood_anew", False)):
        found = model.joint_log_density(task, buffer).mean().item() / 16
        assert last[column] == pytest.approx(found, rel=1e-5)
    assert last["joint_log_likelihood"] != last["joint_log_likelihood_anew"]
    assert last["joint_difference_stderr"] > 0
    plain, _ = run(tmp_path / "without")
    assert all(value is None for name, value in plain[-1].items() if name.startswith("joint"))


def test_coverage_is_the_share_of_targets_between_two_quantiles(tmp_path):
    rows, model = run(tmp_path)
    tasks, shares = recorded_runs.sources(parameters(), "cpu")[1], []
    for index in range(recorded_runs.N_HELD_OUT_BATCHES):
        task = tasks.sample(recorded_runs.HELD_OUT_SEED, index, 8, 16, 16)
        found = model(task.x_context, task.y_context, task.x_target).detach()
        prediction = Prediction(found, model.config.sigma_min)
        low, high = prediction.quantile(0.05), prediction.quantile(0.95)
        shares.append(((low <= task.y_target) & (task.y_target <= high)).double().mean().item())
    assert rows[-1]["heldout_coverage"] == pytest.approx(sum(shares) / len(shares))
    assert 0.5 < rows[-1]["heldout_coverage"] < 1


def test_weights_trained_in_8_bits_predict_in_16(tmp_path):
    small = parameters()["model"] | {"d_model": 32, "d_ff": 64}
    spec = {"mlp": "e4m3", "projection": "torch"}
    rows, model = run(
        tmp_path, model=small, dtype="bfloat16", variant="narrow", variant_spec=spec, steps=3
    )
    torch.manual_seed(1)
    wide = TransformerNP(model.config, Variant("wide", mlp="own"), torch.bfloat16)
    wide.load_state_dict(model.state_dict())
    held_out = recorded_runs.sources(parameters(), torch.device("cpu"))[1]
    evaluation = recorded_runs.Evaluation(held_out, parameters())
    found, narrow = evaluation(wide), evaluation._log_likelihoods(model).double().mean().item()
    assert found["heldout_log_likelihood_8_bits"] is None
    for name in ("log_likelihood", "log_likelihood_shuffled", "coverage"):
        assert rows[-1][f"heldout_{name}"] == found[f"heldout_{name}"]
    assert rows[-1]["heldout_log_likelihood_8_bits"] == narrow != found["heldout_log_likelihood"]


def test_the_last_steps_may_be_in_16_bits(tmp_path):
    small = parameters()["model"] | {"d_model": 32, "d_ff": 64}
    spec = {"mlp": "e4m3", "projection": "torch"}
    narrow = {"model": small, "dtype": "bfloat16", "variant": "narrow", "variant_spec": spec}
    narrow |= {"steps": 6, "eval_every": 2}
    of_two, model = run(tmp_path / "two", last_in_16_bits=3, **narrow)
    whole, in_8_bits = run(tmp_path / "whole", **narrow)
    assert not model.variant.in_8_bits and in_8_bits.variant.in_8_bits
    assert [row["step"] for row in of_two] == [0, 2, 3, 4, 6]  # 3: the change
    assert {row["last_in_16_bits"] for row in of_two} == {3}
    assert {row["last_in_16_bits"] for row in whole} == {0}
    bits = [row["heldout_log_likelihood_8_bits"] is not None for row in of_two]
    assert bits == [True, True, True, False, False]
    learnt, other = (rows[-1]["heldout_log_likelihood"] for rows in (of_two, whole))
    assert learnt != other and learnt == pytest.approx(other, abs=0.1)
    for step in (2, 4):  # a killed run continues in the right format
        run_killed(tmp_path / str(step), step, last_in_16_bits=3, **narrow)
        again, other = run(tmp_path / str(step), last_in_16_bits=3, **narrow)
        assert without_time(again) == without_time(of_two)
        for name, weight in model.state_dict().items():
            assert weight.equal(other.state_dict()[name])


def test_a_run_that_diverges_ends_with_a_row_that_says_so(tmp_path, monkeypatch):
    def evaluated(self, model, evaluate=recorded_runs.Evaluation.__call__):
        found = evaluate(self, model)
        return found | {"heldout_log_likelihood": math.nan} if weight(model) != start else found

    def weight(model):
        return model.blocks[0].mlp.up[0, 0].item()

    start = weight(run(tmp_path / "start", learning_rate=1e-30)[1])
    monkeypatch.setattr(recorded_runs.Evaluation, "__call__", evaluated)
    rows, _ = run(tmp_path / "diverged")
    assert [row["step"] for row in rows] == [0, 3]
    assert math.isnan(rows[-1]["heldout_log_likelihood"])
    assert not (tmp_path / "diverged" / "final.pt").exists()


def test_a_recipe_has_all_that_a_run_shares_with_its_baseline(tmp_path):
    about = {"baseline": "separate", "seed": 1, "variant": "reference"}
    rows = [run(tmp_path / str(i), **more)[0][-1] for i, more in enumerate(({}, about))]
    assert rows[0]["recipe"] == rows[1]["recipe"] and rows[0]["baseline"] == ""
    assert rows[1]["baseline"] == "separate"
    recipe = json.loads(rows[0]["recipe"])
    assert recipe["steps"] == 6 and recipe["model"]["d_model"] == 32
    assert not recipe.keys() & {"seed", "variant", "run"}


def test_a_control_trains_with_rounded_products(tmp_path):
    every = {
        name: run(tmp_path / name, dtype="bfloat16", **changes)[0]
        for name, changes in (("plain", {}), ("e5m2", {"products": "e5m2"}))
    }
    first, rows = ({name: of[at] for name, of in every.items()} for at in (0, -1))
    name = "heldout_log_likelihood"  # of equal weights: no product of an evaluation is rounded
    assert first["plain"][name] == first["e5m2"][name]
    assert rows["plain"]["products"] == "" and rows["e5m2"]["products"] == "e5m2"
    assert rows["plain"]["recipe"] == rows["e5m2"]["recipe"]
    assert rows["plain"]["loss"] != rows["e5m2"]["loss"]
    assert rows["plain"]["loss"] == pytest.approx(rows["e5m2"]["loss"], abs=0.1)


def test_learns_from_context(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_runs, "N_HELD_OUT_BATCHES", MANY)
    rows, _ = run(tmp_path, steps=200, eval_every=200, warmup_steps=20)
    last = rows[-1]
    assert last["heldout_log_likelihood"] > last["prior_log_likelihood"] + 0.2
    assert last["heldout_log_likelihood"] > last["heldout_log_likelihood_shuffled"] + 0.3
    error = 3 * last["heldout_log_likelihood_stderr"]
    assert last["heldout_log_likelihood"] < last["exact_log_likelihood"] + error


def test_an_untrained_model_makes_no_use_of_context(tmp_path):
    """The control of the control."""
    last = run(tmp_path, learning_rate=1e-9)[0][-1]
    difference = last["heldout_log_likelihood"] - last["heldout_log_likelihood_shuffled"]
    assert abs(difference) < 0.1


def test_a_model_that_sees_its_targets_is_found_out(tmp_path, monkeypatch):
    def copying(model, task):
        return Normal(task.y_target, SMOOTH.noise).log_prob(task.y_target).mean((1, 2))

    monkeypatch.setattr(recorded_runs.Evaluation, "_log_likelihood", staticmethod(copying))
    with pytest.raises(RuntimeError, match="1.384 nats a target.*it sees its targets"):
        run(tmp_path)
    exact = torch.linspace(0.5, 1.0, 16, dtype=torch.float64)
    noise = torch.tensor([0.1, -0.1], dtype=torch.float64).repeat(8)
    recorded_runs.check_no_leak(exact + noise, exact)  # the exact posterior itself is no leak


def test_learning_rate_warms_up_and_decays():
    rates = [cosine(step, 1.0, 10, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == pytest.approx(1.0)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_another_runs_checkpoint_is_refused(tmp_path):
    run_killed(tmp_path)
    sentence = (
        "latest.pt is of another run: learning_rate is 0.003 there and 0.1 here: delete the file "
        "to start again from step 0, or set the value back"
    )
    with pytest.raises(ValueError, match=sentence):
        run(tmp_path, learning_rate=0.1)


def damaged(folder) -> str:
    """Returns the error's sentence for a checkpoint: one line, without a word of PyTorch's."""
    with pytest.raises(ValueError) as error:
        run(folder)
    sentence = str(error.value)
    assert f"checkpoint {folder / 'latest.pt'}" in sentence and "delete it to start" in sentence
    assert "\n" not in sentence and "weights_only" not in sentence
    return sentence


def test_a_file_that_is_no_whole_checkpoint_is_one_sentence(tmp_path):
    run_killed(tmp_path)
    file = tmp_path / "latest.pt"
    whole, others = file.read_bytes(), (b"plain text\n", b"PK\x03\x04 no archive", bytes(5000))
    for content in (*(whole[:n] for n in (0, 10, 1000, -65, -1)), *others):
        file.write_bytes(content)
        assert "is damaged" in damaged(tmp_path)


def test_a_flipped_bit_is_noticed_wherever_it_is_and_missing_keys_are_named(tmp_path):
    run_killed(tmp_path)
    file = tmp_path / "latest.pt"
    whole = file.read_bytes()
    places = random.Random(0).sample(range(8 * len(whole)), 50)
    for place in [*places, 0, 8 * len(whole) - 1]:
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        file.write_bytes(content)
        with pytest.raises(ValueError, match="is damaged"):
            load_state(file, "cpu")
    file.write_bytes(whole)
    state = load_state(file, "cpu")
    assert state["step"] == 3
    del state["optimizer"], state["reports"]
    tensor_archive.save(file, state)
    assert "it lacks optimizer, reports" in damaged(tmp_path)


def test_a_checkpoint_executes_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "executed"), "w")

    file = tmp_path / "latest.pt"
    file.write_bytes(pickle.dumps(Evil()))
    damaged(tmp_path)
    torch.save({"model": Evil()}, file)
    tensor_archive.seal(file)
    with pytest.raises(ValueError, match="holds _?io.open, which is neither a number, a text nor"):
        run(tmp_path)
    assert not tmp_path.joinpath("executed").exists()


def test_sizes_are_drawn_anew_for_each_step_and_held_out_ones_only_where_asked(
    tmp_path, monkeypatch
):
    sizes = []

    def sample(self, seed, step, *size, original=GaussianProcessTasks.sample):
        sizes.append((seed == recorded_runs.HELD_OUT_SEED, *size))
        return original(self, seed, step, *size)

    monkeypatch.setattr(GaussianProcessTasks, "sample", sample)
    monkeypatch.setattr(recorded_runs, "N_HELD_OUT_VARYING", 5)
    vary = {"n_context": [3, 20], "n_target": [3, 20], "together": 24}
    run(tmp_path / "fixed", steps=12, vary=vary)
    assert {tuple(size) for held_out, *size in sizes if held_out} == {(8, 16, 16)}
    trained = {tuple(size) for held_out, *size in sizes if not held_out}
    assert len(trained) > 6 and all(3 <= m <= 20 and m + n <= 24 for _, m, n in trained)
    sizes.clear()
    rows, _ = run(tmp_path / "both", steps=12, vary=vary, held_out_vary=vary)
    assert len({tuple(size) for held_out, *size in sizes if held_out}) > 2
    assert rows[-1]["heldout_log_likelihood_stderr"] > 0


def test_all_components_start_near_a_standard_normal():
    """Far from one another they make gradients that Adam has not seen, and the loss leaps."""
    torch.manual_seed(0)
    spreads = []
    for changes in ({}, {"heads_gain": 1.0}):
        config = TNPConfig(d_model=64, n_layers=2, n_heads=4, d_ff=128, **changes)
        model = TransformerNP(config, Variant("plain"), torch.float32)
        task = GaussianProcessTasks().sample(0, 0, 8, 20, 50)
        spreads.append(model(*list(task)[:3]).std().item())
    assert spreads[0] < 0.15 < spreads[1]


def test_the_published_protocol_has_the_likelihood_that_is_published(tmp_path):
    """Exact posteriors reach 1.525 nats a target there."""
    about = parameters(source="published_gaussian_process", batch=64)
    about["held_out_vary"] = {"n_context": [3, 46], "n_target": [3, 47], "together": 50}
    tasks, _ = recorded_runs.sources(about, torch.device("cpu"))
    exact = recorded_runs.Evaluation(tasks, about)._exact
    assert exact.mean().item() == pytest.approx(1.525, abs=0.05)
