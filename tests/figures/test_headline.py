"""Tests that figure `headline` says and draws what the rows of the leading steps say."""

import re
from typing import Any

import duckdb

from tests.figures import conftest as sample
from tests.figures.conftest import H200, Build, as_svg, title, unwrapped
from tnp.figures import draw
from tnp.figures.headline import draw as draw_headline


def headline(path: Any) -> Any:
    with duckdb.connect(str(path), read_only=True) as connection:
        return draw_headline(connection)


def test_headline_has_three_bars_and_says_how_much_faster_ours_is(build: Build) -> None:
    chart = headline(build(**sample.merged(H200, sample.steps(sample.THREE))))
    assert chart.to_dict()["title"]["text"] == (
        "Training is 1.50 times as fast as PyTorch's best on an NVIDIA H200"
    )
    svg = as_svg(chart)
    for text in ("1.00×  (200 ms)", "1.33×  (150 ms)", "2.00×  (100 ms)"):
        assert text in svg or text.replace("  ", " ") in svg
    assert "white" not in str(chart.to_dict()["background"])


def test_steps_in_8_bits_have_bars_of_their_own_and_say_what_they_are(build: Build) -> None:
    narrow = {("mid", "pytorch_best_fp8"): 140.0, ("mid", "fp8"): 80.0}
    path = build(**sample.merged(H200, sample.steps(sample.THREE | narrow)))
    chart = headline(path)
    assert "1.50 times as fast as PyTorch's best on" in chart.to_dict()["title"]["text"]
    svg = as_svg(chart)
    for text in ("(80.0 ms)", "(140 ms)", "(100 ms)"):
        assert text in svg
    assert int(re.search(r'width="(\d+)"', svg)[1]) <= 810  # no line is wider than the bars
    ours, peer = (sample.TRAINS[variant] for variant in ("fp8", "pytorch_best_fp8"))
    said = f"In 8 bits: {ours} (our step in 8 bits). In 8 bits: {peer} (all others)."
    assert said in unwrapped(chart)
    for figure in ("speedup", "matrix", "memory"):
        assert "8 bits" not in title(draw(figure, path))
        assert said in unwrapped(draw(figure, path))
    alone = build(**sample.merged(H200, sample.steps(sample.THREE | {("mid", "fp8"): 80.0})))
    assert f"In 8 bits: {ours}." in unwrapped(headline(alone))
    plain = build(**sample.merged(H200, sample.steps(sample.THREE)))
    assert "8 bits" not in as_svg(headline(plain)) + str(draw("speedup", plain).to_dict())


def test_headline_without_evidence_is_hollow_and_claims_nothing(build: Build) -> None:
    chart = headline(build(**sample.merged(H200, sample.steps(sample.THREE, counts=None))))
    assert chart.to_dict()["title"]["text"] == "Training speed on an NVIDIA H200"
    assert "without complete evidence" in as_svg(chart)


def test_headline_leaves_out_a_shape_whose_baseline_does_not_count(build: Build) -> None:
    other = {("small", name): time for (_, name), time in sample.THREE.items()}
    tables = sample.merged(H200, sample.steps(sample.THREE), sample.steps(other, counts=False))
    svg = as_svg(headline(build(**tables)))
    assert ">mid<" in svg and ">small<" not in svg and "Not drawn" not in svg

    for row in tables["speedup"][3:]:
        row |= {"valid": row["role"] != "baseline"}
        row["why_no_speedup"] = "plain PyTorch is not valid: the samples were not precise enough"
    svg = as_svg(headline(build(**tables)))
    assert "Not drawn: small, since plain PyTorch is not valid: the samples were not" in svg
    for row in tables["speedup"][3:]:
        row["varies"] = True
    assert "Not drawn" not in as_svg(headline(build(**tables)))


def test_headline_dates_the_rows_it_draws(build: Build) -> None:
    tables = sample.merged(H200, sample.steps(sample.THREE))
    day = {"device": sample.GPU, "view_name": "speedup", "origin": "recorded"}
    for row, question in zip(tables["speedup"], ("a", "b", "c"), strict=True):
        row["comparison_key"] = question
    tables["recording_days"] = [
        day | {"comparison_key": question, "first_day": date, "last_day": date}
        for question, date in (("a", "2026-02-01"), ("c", "2026-02-03"), ("other", "2026-05-01"))
    ]
    assert "recorded 2026-02-01 to 2026-02-03." in as_svg(headline(build(**tables)))


def test_the_step_of_ours_that_leads_is_drawn_and_spoken_of(build: Build) -> None:
    """It need not be the fastest: that one may have been timed on a faster GPU."""
    tables = sample.merged(H200, sample.steps({**sample.THREE, ("mid", "separate"): 98.0}))
    for row in tables["speedup"]:
        row["leads"] = row["variant"] == "fused"
        if row["variant"] == "separate":
            row |= {"speedup_best_low": None, "speedup_best_high": None, "verdict_best": None}
    path = build(**tables)
    svg = as_svg(headline(path))
    assert "(100 ms)" in svg and "(98.0 ms)" not in svg
    assert title(draw("speedup", path)).startswith("Ours trains 2.00×")


def test_headline_says_which_bars_have_no_interval(build: Build) -> None:
    tables = sample.merged(H200, sample.steps(sample.THREE))
    apart = "Bars without: not timed beside plain PyTorch."
    for row in tables["speedup"]:
        if row["role"] == "baseline":
            row |= {"speedup_low": None, "speedup_high": None}  # compared with itself
    assert apart not in as_svg(headline(build(**tables)))
    for row in tables["speedup"]:
        row |= {"speedup_low": None, "speedup_high": None}
    assert apart in as_svg(headline(build(**tables)))
