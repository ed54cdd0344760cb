"""Training learns from context, resumes exactly, and reads no checkpoint it should not."""

import pytest
import torch

from tnp import train
from tnp.tasks import GaussianProcessTasks


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
    model = train.run(parameters(**changes), "cpu", folder, rows.append)
    return rows, model


def without_time(rows):
    return [{key: value for key, value in row.items() if key != "elapsed_s"} for row in rows]


class Killed(Exception):
    pass


def test_a_resumed_run_is_the_unbroken_one(tmp_path, monkeypatch):
    unbroken, model = run(tmp_path / "unbroken", steps=8)

    def killed_at_5(self, seed, step, *sizes, sample=GaussianProcessTasks.sample):
        if step == 5 and seed == 0:
            raise Killed
        return sample(self, seed, step, *sizes)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(GaussianProcessTasks, "sample", killed_at_5)
        run(tmp_path / "resumed", steps=8)
    resumed, again = run(tmp_path / "resumed", steps=8)
    assert without_time(resumed) == without_time(unbroken)
    assert [row["step"] for row in resumed] == [0, 3, 6, 8]
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_finished_run_starts_again_and_keeps_its_weights(tmp_path):
    _, model = run(tmp_path)
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, final["model"][name])
    assert not (tmp_path / "latest.pt").exists()
    rows, _ = run(tmp_path, learning_rate=1e-3)
    assert rows[0]["step"] == 0 and rows[0]["loss"] is None


def test_rows_fill_the_table(tmp_path):
    rows, _ = run(tmp_path)
    provenance = {name for name, _ in PROVENANCE}
    assert all(row.keys() == set(TABLES["training"].names) - provenance for row in rows)


def test_learns_from_context(tmp_path):
    rows, _ = run(tmp_path, steps=250, eval_every=250, batch=16, warmup_steps=20)
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


def test_a_model_that_sees_its_targets_is_found_out():
    """The best predictor that knows the targets too: the exact posterior given all points."""
    tasks = GaussianProcessTasks()
    task = tasks.sample(0, 0, 16, 8, 8)
    exact = tasks.exact_log_likelihood(task, 0, 0)
    everything = Task(
        torch.cat([task.x_context, task.x_target], dim=1),
        torch.cat([task.y_context, task.y_target], dim=1),
        task.x_target,
        task.y_target,
    )
    leaking = posterior_log_likelihood(everything, tasks.lengthscale(task, 0, 0))
    train.check_no_leak(exact, exact)
    with pytest.raises(RuntimeError, match="it sees its targets"):
        train.check_no_leak(leaking, exact)


def test_images_train(tmp_path):
    rows, _ = run(tmp_path, source="images", n_context=64, n_target=100, steps=3)
    assert rows[-1]["exact_log_likelihood"] is None
    assert rows[-1]["loss"] > 0


def test_learning_rate_warms_up_and_decays():
    rates = [train.learning_rate(step, 1.0, 10, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == pytest.approx(1.0)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_another_runs_checkpoint_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match="another run: learning_rate is 0.003 there and 0.1 here"):
        run(tmp_path, learning_rate=0.1)


def test_a_truncated_checkpoint_is_one_sentence(tmp_path):
    run(tmp_path)
    file = tmp_path / "latest.pt"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot read checkpoint .*delete it to start"):
        run(tmp_path)


def test_a_checkpoint_executes_no_code(tmp_path):
    import pickle

    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "executed"), "w")

    tmp_path.joinpath("latest.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="cannot read checkpoint"):
        run(tmp_path)
    assert not tmp_path.joinpath("executed").exists()


def test_unknown_source_raises(tmp_path):
    with pytest.raises(ValueError, match="unknown source 'image': choose from gaussian_process"):
        run(tmp_path, source="image")
