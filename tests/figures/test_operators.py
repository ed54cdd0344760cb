"""Tests how many of our timings figure `operators` counts as faster and slower."""

from tests.figures import conftest as sample
from tests.figures.conftest import Drawn, title


def test_verdicts_are_counted_and_those_without_one_left_out(drawn: Drawn) -> None:
    ratios = {
        ("wide", "forward"): (1.2, "faster"),
        ("wide", "backward"): (0.8, "slower"),
        ("narrow", "forward"): (1.0, "ambiguous"),
        ("narrow", "backward"): (1.3, None),
    }
    found = title(drawn("operators", sample.operator_rows(ratios)))
    assert "In 3 comparisons" in found
    assert "ours is faster in 1 and slower in 1" in found


def test_our_fastest_stands_for_a_size_and_what_lies_far_out_at_the_edge(drawn: Drawn) -> None:
    content = drawn(
        "operators", sample.operator_rows({("wide", "forward"): (9.0, "faster")})
    ).to_dict()
    rows = [row for rows in content["datasets"].values() for row in rows if "shown" in row]
    assert {row["implementation"] for row in rows} == {"ours in Triton"}
    assert {(row["shown"], row["speedup_best"]) for row in rows} == {(4.0, 9.0)}


def test_each_study_has_a_panel_and_one_of_many_sizes_is_a_distribution(drawn: Drawn) -> None:
    few = sample.operator_rows({("wide", "forward"): (1.2, "faster")})
    many = sample.operator_rows(
        {(f"rows{i}", "forward"): (1 + i / 100, "faster") for i in range(60)}
    )
    for row in many["operator_speedup"]:
        row["config_id"] = row["config_id"].replace("swiglu", "lab")
    content = drawn("operators", few, many).to_dict()
    rows = [row for rows in content["datasets"].values() for row in rows if "shown" in row]
    assert {(row["study"], row["distributed"]) for row in rows} == {
        ("swiglu", False),
        ("lab", True),
    }
