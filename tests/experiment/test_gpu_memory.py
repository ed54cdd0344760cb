"""Tests how many gates fit a GPU side by side, and what is said where memory runs out."""

import pytest

from tnp.experiment.gpu_memory import MOST_GATES, Busy, gates_at_once, judged, limit_gb


@pytest.mark.parametrize(
    ("free", "limit", "n"),
    [
        (None, None, MOST_GATES),  # of a CPU
        (139.0, None, 4),
        (79.0, None, 3),
        (40.0, None, 2),
        (23.0, None, 1),
        (15.0, None, 1),
        (0.1, None, 1),
        (79.0, 16.0, 4),
        (23.0, 10.0, 2),
    ],
)
def test_gates_at_once_follow_free_memory(free, limit, n):
    assert gates_at_once(free, limit) == n


def test_what_is_too_large_is_told_from_what_others_hold():
    out = "CUDA out of memory"
    assert "does not fit this GPU of 16 GB: CUDA" in judged(1.0, 14.5, 16.0, None, out)
    with pytest.raises(Busy, match="other processes hold 60 of the GPU's 80 GB: CUDA out of"):
        judged(1.0, 19.0, 80.0, None, out)
    # A limit decides where it is reached, whatever others hold.
    assert "does not fit 16 GB, which TNP_GPU_GB allows" in judged(9.0, 15.0, 80.0, 16.0, out)
    with pytest.raises(Busy):
        judged(0.0, 12.0, 80.0, 16.0, out)


@pytest.mark.parametrize("text", ["", " ", "much", "-1", "0", "nan", "inf", "16GB"])
def test_a_limit_that_is_no_number_is_one_sentence_and_an_empty_one_is_none(text, monkeypatch):
    monkeypatch.setenv("TNP_GPU_GB", text)
    if not text.strip():
        assert limit_gb() is None
        return
    with pytest.raises(ValueError, match=f"TNP_GPU_GB is '{text}': it must be a number of GB"):
        limit_gb()
