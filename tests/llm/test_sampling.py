"""Tests of how a token is chosen."""

import pytest
import torch

from tests.refusals import assert_refused
from tnp.llm.sampling import Sampling, choose, gumbel_, scores

LOGITS = torch.tensor([2.0, 1.5, 1.5, 1.0, 0.2, 0.0, -0.5, -1.0, -3.0, -30.0])
N_DRAWS = 40_000


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.zeros(3, 300)
    logits[0, [77, 150, 299]] = 1.0
    logits[1, [0, 299]] = 1.0
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert choose(logits.to(dtype), Sampling()).tolist() == [77, 0, 0]


@pytest.mark.parametrize(
    ("how", "n_kept"),
    [
        ({"temperature": 1.0}, 10),
        ({"temperature": 0.5}, 10),
        ({"temperature": 1.0, "top_k": 2}, 3),  # the second and the third are equal
        ({"temperature": 1.0, "top_k": 50}, 10),
        ({"temperature": 1.0, "top_p": 0.6}, 3),
        ({"temperature": 2.0, "top_k": 6, "top_p": 0.8}, 4),
        ({"temperature": 1.0, "top_p": 1e-6}, 1),
    ],
)
def test_draws_have_the_distribution_of_softmax(how: dict, n_kept: int):
    """Frequencies of 40,000 draws lie within five deviations, and nothing else is drawn."""
    sampling = Sampling(**how)
    z = LOGITS.double() / sampling.temperature
    if sampling.top_k:
        z[z < z.sort(descending=True).values[min(sampling.top_k, 10) - 1]] = -torch.inf
    p = z.softmax(0)
    if sampling.top_p:
        order = p.argsort(descending=True, stable=True)
        before = p[order].cumsum(0) - p[order]
        p[order[before >= sampling.top_p]] = 0.0
        p /= p.sum()
    assert int((p > 0).sum()) == n_kept
    noise = torch.empty(N_DRAWS, 10)
    gumbel_(noise, torch.Generator().manual_seed(0))
    drawn = choose(LOGITS.expand(N_DRAWS, -1), sampling, noise).bincount(minlength=10)
    deviation = (p * (1 - p) / N_DRAWS).sqrt()
    assert ((drawn / N_DRAWS - p).abs() <= 5 * deviation).all()


def test_a_wrong_temperature_is_found_by_the_test_above():
    """The control: draws at temperature 1.1 are off by more than five deviations."""
    noise = torch.empty(N_DRAWS, 10)
    gumbel_(noise, torch.Generator().manual_seed(0))
    drawn = choose(LOGITS.expand(N_DRAWS, -1), Sampling(1.1), noise).bincount(minlength=10)
    p = LOGITS.double().softmax(0)
    assert ((drawn / N_DRAWS - p).abs() > 5 * (p * (1 - p) / N_DRAWS).sqrt()).any()


def test_what_is_left_out_is_what_hugging_face_leaves_out():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(20, 500, generator=torch.Generator().manual_seed(0))
    expected = logits
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(40), TopPLogitsWarper(0.9)):
        expected = warper(None, expected)
    torch.testing.assert_close(scores(logits, Sampling(0.7, 40, 0.9)), expected)


def test_numbers_out_of_range_are_refused():
    assert_refused(
        (lambda: Sampling(-0.1), "temperature is -0.1: it must be finite and at least 0"),
        (lambda: Sampling(float("nan")), "temperature is nan: it must be finite"),
        (lambda: Sampling("hot"), "temperature is 'hot': it must be a number"),
        (lambda: Sampling(1.0, 0), "top_k is 0: it must be a whole number, at least 1"),
        (lambda: Sampling(1.0, None, 0.0), "top_p is 0.0: it must be above 0 and at most 1"),
        (lambda: Sampling(1.0, None, 1.5), "top_p is 1.5: it must be above 0 and at most 1"),
        (lambda: Sampling(0.0, 5), "top_k is 5 and temperature 0: give a temperature above 0"),
        (lambda: Sampling(0.0, None, 0.5), "top_p is 0.5 and temperature 0"),
    )
