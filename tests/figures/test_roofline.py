"""Tests which of our operators figure `roofline` names, and beside whom."""

import re

from tests.figures import conftest as sample
from tests.figures.conftest import Drawn, as_svg, title


def test_roofline_names_the_peer_at_the_same_shape(drawn: Drawn) -> None:
    shares = {
        ("separate", "mid"): 0.6,
        ("sdpa_cudnn", "mid"): 0.7,
        ("fa4", "mid"): 0.8,
        ("sdpa_cudnn", "small"): 0.9,
        ("separate", "small"): 0.1,
    }
    found = title(drawn("roofline", sample.roofline_rows(shares)))
    assert found == (
        "Attention forward of our deterministic attention reaches 60% of the NVIDIA H200 roofline "
        "at mid; FlashAttention 4 reaches 80%"
    )


def test_roofline_of_an_operator_without_operations_is_its_share_of_the_copy(drawn: Drawn) -> None:
    tables = sample.roofline_rows({("fused", "small"): 0.9, ("torch", "small"): 0.4})
    for row in tables["roofline"]:
        row |= {"op": "rms_norm", "tflops": None, "intensity": 0.0, "gb_per_s": 3780.0}
        row["bytes"] = 4e6
    chart = drawn("roofline", tables)
    assert title(chart) == (
        "RMSNorm forward of ours reaches 90% of the NVIDIA H200 roofline at small; "
        "PyTorch reaches 40%"
    )
    svg = as_svg(chart)
    assert "90%, 3,780 GB/s" in svg and "read and written, MB" in svg


def test_roofline_has_a_plane_for_each_operator(drawn: Drawn) -> None:
    tables = sample.roofline_rows({("separate", "small"): 0.6})
    (row,) = tables["roofline"]
    tables["roofline"].append(row | {"op": "mlp", "shape": "odd"})
    svg = as_svg(drawn("roofline", tables))
    assert svg.count(">intensity, FLOP/byte</text>") == 2
    # Beside the line of its share, and on the plane above.
    assert [svg.count(f">{shape}</text>") for shape in ("small", "odd")] == [2, 2]


def test_roofline_leaves_out_names_that_would_overlap(drawn: Drawn) -> None:
    tables = sample.roofline_rows({("separate", "mid"): 0.6})
    (row,) = tables["roofline"]
    for n in (1, 2):  # a tenth of a decade apart
        name = {"shape": f"a_shape_with_a_long_name_{n}", "intensity": 5000.0 * 1.3**n}
        tables["roofline"].append(row | name)
    svg = as_svg(drawn("roofline", tables))
    names = "mid", "a_shape_with_a_long_name_1", "a_shape_with_a_long_name_2"
    assert [svg.count(f">{name}</text>") for name in names] == [2, 2, 1]


def test_roofline_names_what_failed_and_draws_no_line_where_nothing_was_timed(
    drawn: Drawn,
) -> None:
    shares = {("fa4", "mid"): "timeout", ("separate", "mid"): 0.6, ("separate", "small"): "oom"}
    tables = sample.roofline_rows(shares)
    tables["roofline"][0]["reason"] = "\x1b[91merror\x1b[0m"  # which no SVG may hold
    svg = as_svg(drawn("roofline", tables))
    assert "FlashAttention 4 (timed out) at mid" in svg
    assert "our deterministic attention (out of memory) at small" in svg
    assert len(re.findall(r">small</text>", svg)) == 0

    failed = sample.roofline_rows({("separate", "mid"): "oom"})
    assert "nothing was timed" in as_svg(drawn("roofline", failed))
