"""Tests which kernel figure `profiles` names, and what it says of kernels without a profile."""

from tests.figures import conftest as sample
from tests.figures.conftest import Drawn, as_svg, title


def test_the_kernel_of_ours_nearest_to_a_peak_is_the_finding(drawn: Drawn) -> None:
    rows = sample.profile_rows({"torch": 95.0, "triton": 88.0})
    found = title(drawn("profiles", rows))
    assert (
        found
        == "SwiGLU forward of ours in Triton at tiny reaches 88% of the peak of DRAM throughput"
    )


def test_without_one_of_ours_the_others_are_named(drawn: Drawn) -> None:
    found = title(drawn("profiles", sample.profile_rows({"torch": 95.0})))
    assert "of PyTorch at tiny reaches 95%" in found


def test_what_could_not_be_profiled_stands_on_its_line(drawn: Drawn) -> None:
    rows = sample.profile_rows({"torch": "unsupported", "triton": 88.0})
    svg = as_svg(drawn("profiles", rows))
    assert "cannot run here" in svg and "because unsupported" in svg
    assert "9.00 µs, 2 kernels; long scoreboard 60%, wait 30%, barrier 5%" in svg
    failed = sample.profile_rows({"torch": "unsupported"})
    assert title(drawn("profiles", failed)) == "No kernel could be profiled"


def test_quick_sections_say_nothing_of_waiting(drawn: Drawn) -> None:
    rows = sample.profile_rows({"triton": 88.0}, sections="quick")
    svg = as_svg(drawn("profiles", rows))
    assert "9.00 µs, 2 kernels" in svg and "scoreboard" not in svg
