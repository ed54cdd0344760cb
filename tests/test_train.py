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
    assert [row["step"] for row in resumed] == [3, 6, 8]
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_finished_run_gives_its_rows_and_trains_no_more(tmp_path, monkeypatch):
    rows, _ = run(tmp_path)
    monkeypatch.setattr(train.TrainingStep, "__call__", None)
    assert run(tmp_path)[0] == rows


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
