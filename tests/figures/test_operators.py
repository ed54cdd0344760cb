"""Figure `operators` says how many of our timings are faster and slower, one of ours a size."""

from tests.figures import conftest as sample
from tests.figures.conftest import H200, Build, title
from tnp.figures import draw


def drawn(build: Build, ratios: dict) -> object:
    return draw("operators", build(**sample.merged(H200, sample.operator_rows(ratios))))


def test_verdicts_are_counted_and_those_without_one_left_out(build: Build) -> None:
    ratios = {
        ("wide", "forward"): (1.2, "faster"),
        ("wide", "backward"): (0.8, "slower"),
        ("narrow", "forward"): (1.0, "ambiguous"),
        ("narrow", "backward"): (1.3, None),
    }
    found = title(drawn(build, ratios))
    assert "Of 3 timings of ours" in found
    assert "1 are faster and 1 slower" in found


def test_our_fastest_stands_for_a_size_and_what_lies_far_out_at_the_edge(build: Build) -> None:
    content = drawn(build, {("wide", "forward"): (9.0, "faster")}).to_dict()
    rows = [row for rows in content["datasets"].values() for row in rows if "shown" in row]
    assert {row["implementation"] for row in rows} == {"ours, in Triton"}
    assert {(row["shown"], row["speedup_best"]) for row in rows} == {(4.0, 9.0)}
