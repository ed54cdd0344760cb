"""Tests what figure `language_models` finds, and how it draws what others published."""

from tests.figures import conftest as sample
from tests.figures.conftest import Drawn, as_svg, title


def test_ours_is_compared_with_the_fastest_other_form(drawn: Drawn) -> None:
    rows = sample.language_rows({"hf": 100.0, "hf_static": 800.0, "ours": 1600.0})
    assert title(drawn("language_models", rows)) == (
        "With Llama 3.2 1B in bf16 and one sequence of 32 tokens, ours writes 1,600 tokens/s on "
        "NVIDIA H200 and is 2.00× as fast as Hugging Face, compiled"
    )
    assert "1,600, 80%" in as_svg(drawn("language_models", rows))


def test_without_evidence_there_is_no_verdict(drawn: Drawn) -> None:
    rows = sample.language_rows({"hf": 100.0, "ours": 300.0}, counts=None)
    assert "3.00× as fast (medians alone, no verdict) as" in title(drawn("language_models", rows))


def test_without_ours_the_fastest_is_named(drawn: Drawn) -> None:
    found = title(drawn("language_models", sample.language_rows({"hf": 100.0, "ours": "oom"})))
    assert found.endswith(
        "Hugging Face writes 100 tokens/s on NVIDIA H200; ours was not timed beside it"
    )
    failed = sample.language_rows({"hf": "oom"})
    assert title(drawn("language_models", failed)) == "No form of a language model could be timed"


def test_a_published_figure_stands_beside_its_own_batch(drawn: Drawn) -> None:
    rows = sample.language_rows({"hf": 100.0, "vllm": "unsupported"})
    svg = as_svg(drawn("language_models", rows))
    assert "megakernel: H100" in svg and "1,057" in svg and "a paper, 2025-05-27, counted" in svg
    assert "cannot run here" in svg and "limit 2,000 tokens/s" in svg
    other = sample.language_rows({"hf": 100.0}, batch=8)
    assert "megakernel" not in as_svg(drawn("language_models", other))
