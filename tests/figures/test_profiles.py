"""Figure `profiles` says which of our kernels comes nearest to a peak, and why others have none."""

from tests.figures import conftest as sample
from tests.figures.conftest import H200, Build, as_svg, title
from tnp.figures import draw


def test_the_kernel_of_ours_nearest_to_a_peak_is_the_finding(build: Build) -> None:
    rows = sample.profile_rows({"torch": 95.0, "triton": 88.0})
    found = title(draw("profiles", build(**sample.merged(H200, rows))))
    assert (
        found
        == "SwiGLU forward of ours in Triton at tiny reaches 88% of the peak of DRAM throughput"
    )


def test_without_one_of_ours_the_others_are_named(build: Build) -> None:
    found = title(
        draw("profiles", build(**sample.merged(H200, sample.profile_rows({"torch": 95.0}))))
    )
    assert "of PyTorch at tiny reaches 95%" in found


def test_what_could_not_be_profiled_stands_on_its_line(build: Build) -> None:
    rows = sample.profile_rows({"torch": "unsupported", "triton": 88.0})
    svg = as_svg(draw("profiles", build(**sample.merged(H200, rows))))
    assert "cannot run here" in svg and "because unsupported" in svg
    assert "9.00 µs, 2 kernels; long scoreboard 60%, wait 30%, barrier 5%" in svg
    failed = sample.profile_rows({"torch": "unsupported"})
    assert title(draw("profiles", build(**failed))) == "No kernel could be profiled"


def test_quick_sections_say_nothing_of_waiting(build: Build) -> None:
    rows = sample.profile_rows({"triton": 88.0}, sections="quick")
    svg = as_svg(draw("profiles", build(**sample.merged(H200, rows))))
    assert "9.00 µs, 2 kernels" in svg and "scoreboard" not in svg
