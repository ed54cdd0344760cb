"""Tests that titles say what the rows say, and nothing more."""

import re
from typing import Any

import pytest
import vl_convert

from tests.figures import conftest as sample
from tests.figures.conftest import Drawn, as_svg, title, unwrapped

MLP, BACKWARD = ("mlp", "forward"), ("attention", "backward")  # stages of a step


def speedup_title(drawn: Drawn, times: dict) -> str:
    return title(drawn("speedup", sample.steps(times)))


@pytest.mark.parametrize(
    ("times", "says", "says_not"),
    [
        (
            {"sdpa_flash": 200.0, "sdpa_cudnn": 150.0, "separate": 100.0},
            ["^Our deterministic attention trains 2.00× as fast as plain PyTorch",
             "at mid on NVIDIA H200", "1.50× as fast as PyTorch's fastest"], "slower",
        ),
        (
            {"sdpa_flash": 200.0, "sdpa_cudnn": 80.0, "separate": 100.0},
            ["2.00× as fast as plain PyTorch", "0.800× as fast as PyTorch's fastest"], "At all",
        ),
        (
            {"sdpa_flash": 100.0, "separate": 150.0},
            ["0.667× as fast as plain PyTorch"], "faster than",
        ),
        (
            {"sdpa_flash": 100.0, "separate": 99.5},
            ["neither measurably faster nor slower than plain PyTorch"], "×",
        ),
        (
            {"sdpa_flash": 100.0, "sdpa_cudnn": 50.0},
            ["^PyTorch with cuDNN attention trains 2.00× as fast as plain PyTorch"], "[Oo]ur",
        ),
        (
            {"sdpa_flash": 100.0},
            ["^No configuration timed on NVIDIA H200 is measurably faster than"], "×",
        ),
    ],
)  # fmt: skip
def test_speedup_claims_what_its_intervals_show(
    drawn: Drawn, times: dict[str, float], says: list[str], says_not: str
) -> None:
    found = speedup_title(drawn, {("mid", name): time for name, time in times.items()})
    assert all(re.search(text, found) for text in says)
    assert not re.search(says_not, found)


def test_speedup_ahead_at_every_size_says_how_far(drawn: Drawn) -> None:
    times = {
        (shape, name): time * factor
        for shape, factor in (("small", 0.8), ("mid", 1.0))
        for (name, time) in (("sdpa_flash", 200.0), ("sdpa_cudnn", 150.0))
    }
    ours = {("small", "separate"): 100.0, ("mid", "separate"): 100.0}
    assert speedup_title(drawn, times | ours) == (
        "At all 2 sizes on NVIDIA H200 our fastest step trains 1.20× to 1.50× as fast as "
        "PyTorch's fastest, and 1.60× to 2.00× as fast as plain PyTorch"
    )
    slower = speedup_title(drawn, times | ours | {("small", "separate"): 140.0})
    assert "1.50× as fast as PyTorch's fastest configuration there" in slower
    assert "At all" not in slower


def filled(chart: Any) -> set[bool]:
    points = re.findall(r'<path [^>]*="point"[^>]*/>', as_svg(chart))
    return {"fill=" in mark for mark in points}


@pytest.mark.parametrize("counts", [True, None])
def test_steps_without_evidence_are_hollow_and_claim_nothing(
    drawn: Drawn, counts: bool | None
) -> None:
    times = {("mid", "sdpa_flash"): 200.0, ("mid", "separate"): 100.0}
    chart = drawn("speedup", sample.steps(times, counts=counts))
    assert ("2.00× as fast as" in title(chart)) is bool(counts)
    assert ("medians alone" in title(chart)) is not bool(counts)
    assert filled(chart) == {bool(counts)}


@pytest.mark.parametrize("counts", [True, None, False])
def test_memory_and_stages_without_evidence_are_hollow_and_pale(
    drawn: Drawn, counts: bool | None
) -> None:
    """Times that do not count say nothing against the memory that was measured beside them."""
    times = {("mid", "sdpa_flash"): 200.0, ("mid", "separate"): 100.0}
    assert filled(drawn("memory", sample.steps(times, counts=counts))) == {counts is not None}
    if counts is not False:
        svg = as_svg(drawn("stages", sample.stage_rows({MLP: 1.0, BACKWARD: 3.0}, counts=counts)))
        assert ('opacity="0.4"' in svg) is (counts is None)


@pytest.mark.parametrize("figure", ["speedup", "matrix", "ablation"])
def test_what_is_known_not_to_count_is_named_and_not_drawn(drawn: Drawn, figure: str) -> None:
    times = {("mid", "sdpa_flash"): 200.0, ("mid", "separate"): 100.0}
    tables = sample.merged(
        sample.steps(times, counts=False), sample.ablation_rows({("mlp", "mid"): 1.0}, counts=False)
    )
    chart = drawn(figure, tables)
    assert "timed, but not valid" in as_svg(chart)
    assert title(chart) in (
        "No configuration could be timed yet",
        "No component could be timed yet",
    )


@pytest.mark.parametrize("figure", ["speedup", "matrix"])
def test_a_size_that_pytorch_was_not_run_at_is_left_out(drawn: Drawn, figure: str) -> None:
    tables = sample.steps(sample.THREE)
    ours = next(row for row in tables[figure] if row["role"] == "own")
    tables[figure].append(ours | {"shape": "alone", "batch": 4096})
    svg = as_svg(drawn(figure, tables))
    assert "alone" not in svg and ours["shape"] in svg


def test_speedup_without_a_baseline_that_counts_is_over_pytorchs_fastest(drawn: Drawn) -> None:
    tables = sample.steps(sample.THREE)
    plain, *others = tables["speedup"]
    plain |= {
        "valid": False,
        "why_not": "the samples were not precise enough",
        "speedup_best": None,
    }
    for row in (plain, *others):
        row |= {"speedup": None, "speedup_low": None, "speedup_high": None, "verdict": None}
        row["why_no_speedup"] = "plain PyTorch is not valid: the samples were not precise enough"
    svg = as_svg(drawn("speedup", tables))
    assert "Plain PyTorch is not valid: the samples were not precise enough: compared with" in svg
    assert "reason: the samples were not precise enough" in svg  # in the tooltip of its empty line
    assert "speedup over PyTorch's fastest" in svg
    assert ">1.50× (1.48–1.52)<" in svg and "150 ms; " not in svg


def test_speedup_of_a_step_that_is_not_compared_says_why(drawn: Drawn) -> None:
    tables = sample.steps(sample.THREE)
    tables["speedup"][-1] |= {"speedup": None, "speedup_low": None, "speedup_high": None}
    tables["speedup"][-1]["why_no_speedup"] = "its work was counted otherwise"
    svg = as_svg(drawn("speedup", tables))
    assert "100 ms; its work was counted otherwise" in svg


@pytest.mark.parametrize("figure", ["speedup", "memory", "matrix"])
def test_failed_configurations_stay_visible(drawn: Drawn, figure: str) -> None:
    times = {("mid", "sdpa_flash"): 100.0, ("mid", "separate"): "gate_failed"}
    svg = as_svg(drawn(figure, sample.steps(times)))
    assert "our deterministic attention" in svg and "gate failed" in svg
    if figure == "speedup":  # of failures alone it claims nothing
        chart = drawn(figure, sample.steps({("mid", "sdpa_flash"): "oom"}))
        assert title(chart) == "No configuration could be timed yet"
        assert "out of memory" in as_svg(chart)


@pytest.mark.parametrize("figure", ["speedup", "memory", "matrix"])
def test_a_failed_baseline_hides_nothing_that_was_timed(drawn: Drawn, figure: str) -> None:
    tables = sample.steps({("mid", "sdpa_flash"): 9.0, ("mid", "own"): 6.0})
    for view in ("speedup", "matrix", "memory", "step_summary"):
        for row in tables[view]:
            speedups = {column: None for column in row if "speedup" in column}
            row |= speedups
            if view == "speedup":
                why = "plain PyTorch could not be timed: oom"
                row |= {"baseline_step_ms": None, "why_no_speedup": why}
    tables["speedup"][0] |= {"status": "oom", "step_ms": None}
    svg = as_svg(drawn(figure, tables))
    expected = {
        "speedup": "6.00 ms; plain PyTorch could not be timed: oom",
        "memory": "8.00",
        "matrix": "6.00 ms",
    }
    assert expected[figure] in svg


def test_memory_compares_checkpointing_with_the_same_variant_without(drawn: Drawn) -> None:
    times = {("mid", "sdpa_flash"): 100.0}
    plain, saving = sample.steps(times), sample.steps(times, checkpoint=True)
    found = title(drawn("memory", plain, saving))
    assert "Checkpointing cuts peak memory 4.00× for plain PyTorch at mid" in found
    assert "8.00 to 2.00 GiB" in found

    saving["memory"][0]["peak_memory_gib"] = 9.0
    found = title(drawn("memory", plain, saving))
    assert "Checkpointing saves no memory" in found and "cuts" not in found

    found = title(drawn("memory", plain))
    assert "up to 8.00 GiB on NVIDIA H200" in found and "heckpointing" not in found


def test_memory_compares_ours_with_plain_pytorch_without_checkpointing(drawn: Drawn) -> None:
    times = {("mid", "sdpa_flash"): 100.0, ("mid", "fused"): 80.0}
    plain, saving = sample.steps(times), sample.steps(times, checkpoint=True)
    plain["memory"][1]["peak_memory_gib"] = 3.0
    found = title(drawn("memory", plain, saving))
    assert found == (
        "A training step at mid on NVIDIA H200 needs 3.00 GiB with ours, and 8.00 GiB with "
        "plain PyTorch"
    )


def test_stages_say_where_ours_gains_most_of_a_step(drawn: Drawn) -> None:
    """At mid 10 of 100 ms in the MLP, at small 2 of 8 in attention, which is more of a step."""
    tables = sample.merged(
        sample.stage_rows({MLP: 40.0, BACKWARD: 60.0}),
        sample.stage_rows({MLP: 30.0, BACKWARD: 61.0}, variant="fused"),
        sample.stage_rows({MLP: 3.0, BACKWARD: 5.0}, shape="small"),
        sample.stage_rows({MLP: 3.0, BACKWARD: 3.0}, shape="small", variant="fused"),
        # This row is of another step than the fastest.
        sample.stage_rows({MLP: 0.1, BACKWARD: 0.1}, variant="separate", fastest=False),
    )
    chart = drawn("stages", tables)
    assert title(chart) == (
        "Beside plain PyTorch ours gains most in attention backward, at small on NVIDIA H200: "
        "3.00 ms of device time in place of 5.00 ms, 25% of that step less"
    )
    said = unwrapped(chart)
    assert "Ours with CUDA graph: 91.0 ms of kernels in a step of 101 ms." in said
    assert "our deterministic attention" not in as_svg(chart)


@pytest.mark.parametrize(("figure", "view"), [("memory", "memory"), ("stages", "stage_share")])
def test_sizes_that_only_ours_ran_come_last(figure: str, view: str, drawn: Drawn) -> None:
    """Small comes before mid, unless nothing is compared there."""
    pairs = [(shape, name) for shape in ("small", "mid") for name in ("sdpa_flash", "fused")]
    stages = [sample.stage_rows({MLP: 9.0}, shape=at, variant=name) for at, name in pairs]
    tables = sample.merged(sample.steps(dict.fromkeys(pairs, 9.0)), *stages)
    svg = as_svg(drawn(figure, tables))
    assert 0 <= svg.index(">small<") < svg.index(">mid<")
    tables[view] = [
        row for row in tables[view] if (row["shape"], row["role"]) != ("small", "baseline")
    ]
    svg = as_svg(drawn(figure, tables))
    assert 0 <= svg.index(">mid<") < svg.index(">small<")


def test_stages_say_where_ours_gains_nowhere_and_whose_each_bar_is(drawn: Drawn) -> None:
    """Colours alone tell nobody who cannot tell them apart."""
    pytorch, both = (sample.stage_rows({MLP: 3.0, **rest}) for rest in ({}, {BACKWARD: 4.5}))
    chart = drawn("stages", pytorch, sample.stage_rows({MLP: 4.0}, variant="fused"))
    assert title(chart) == "No stage of ours takes less device time than PyTorch's on NVIDIA H200"
    svg = as_svg(chart)
    assert "plain PyTorch 3.00 ms" in svg and "ours 4.00 ms" in svg
    assert title(drawn("stages", both)) == (
        "Attention backward takes 60% of the device time of a training step of plain PyTorch "
        "with CUDA graph at mid on NVIDIA H200"
    )


def test_training_claims_learning_only_above_the_shuffled_control(drawn: Drawn) -> None:
    found = title(drawn("training", sample.training_rows(0.5, -1.5)))
    assert "learns from its context on NVIDIA H200 after 1,000 steps: 75% of the way" in found

    chart = drawn("training", sample.training_rows(0.5, 0.45))
    assert "is not shown to use its context" in title(chart)
    assert "not shown to use its context: shuffling it costs less than" in as_svg(chart)

    worse_than_prior = sample.training_rows(-1.2, -2.0)
    found = title(drawn("training", worse_than_prior))
    assert "of the way" not in found and "0.80 nats per value, though still below" in found

    images = sample.training_rows(0.5, -1.5, exact=None)
    found = title(drawn("training", images))
    assert "of the way" not in found and found.endswith("2.00 nats per value")


def test_training_names_the_runs_that_do_not_use_their_context(drawn: Drawn) -> None:
    learns = sample.training_rows(0.5, -1.5)
    found = title(
        drawn("training", learns, sample.training_rows(0.5, 0.45, exact=None, run="images_mid"))
    )
    assert found.startswith("Run gp_small learns from its context")
    assert found.endswith("; images_mid is not shown to use it")


def test_training_draws_the_runs_of_a_study_together(drawn: Drawn) -> None:
    ours = sample.training_rows(0.5, -1.5)
    studied = [
        sample.training_rows(end, -1.5, run=run, study="recipes")
        for run, end in (("clipped", 0.1), ("small_heads", 0.4))
    ]
    chart = drawn("training", ours, *studied)
    assert title(chart).startswith("Run gp_small learns") and "clipped" not in title(chart)
    said = unwrapped(chart)
    assert "differ in one thing: study recipes" in said
    assert "best first: small_heads 0.40, clipped 0.10" in said


@pytest.mark.parametrize("equivalent", [True, False])
def test_training_says_what_the_paired_runs_showed(drawn: Drawn, equivalent: bool) -> None:
    tables = sample.merged(sample.training_rows(0.5, -1.5), sample.paired_rows())
    tables["training_equivalence"][0]["equivalent"] = equivalent
    chart = drawn("training", tables)
    verb = "is" if equivalent else "is not"
    assert title(chart).startswith(
        f"The loss of our deterministic attention {verb} equivalent to that of plain PyTorch, "
        "within 0.010 nats; run gp_small learns"
    )
    said = unwrapped(chart)
    assert "gp_small_separate (our deterministic attention): −0.0020" in said
    assert "(90% interval −0.0040 to +0.0010)" in said
    assert ("not equivalent within ±0.0100" in said) is not equivalent
    tables["training_equivalence"][0] |= {"margin": None, "equivalent": None}
    assert "not comparable" in unwrapped(drawn("training", tables))


def test_training_says_of_seeds_what_their_rows_say(drawn: Drawn) -> None:
    """A run of several seeds has no panel of its own."""
    runs = sample.training_rows(0.5, -1.5)
    equal = "less accurate a step, equal in training"
    control = sample.seed_rows("diverged", products="e5m2", n_pairs=0, difference_8_bits=None)
    of_seed = sample.training_rows(0.3, -1.5, run="seeds_small_0")
    for row in of_seed["training_curves"]:
        row["recipe"] = "{}"
    ended = sample.seed_rows("not known", last_in_16_bits=200, difference_8_bits=None)
    null = sample.seed_rows("not known", variant="fused_centred", difference_8_bits=None)
    chart = drawn("training", runs, of_seed, sample.seed_rows(equal), control, ended, null)
    tasks = "images 64 × (64, 500)"
    assert title(chart) == (
        "Ours beside our deterministic attention: less accurate a step, equal in training in "
        "1 of 2 comparisons"
    )
    said = unwrapped(chart)
    assert "Run gp_small learns from its context" in said and "seeds_small_0" not in said
    drawn_rows = str(chart.to_dict()["datasets"])
    for line in (
        f"ours: 5 of 5 seeds, {equal}",
        "ours with centred keys: 5 of 5 seeds, not known",
        "ours, the last 200 in 16 bits: 5 of 5 seeds, not known",
        "ours in e5m2: 0 of 5 seeds, diverged",
    ):
        assert f"{tasks}, 2,000 steps:\\n{line}" in drawn_rows


def test_ablation_names_what_our_step_needs_most(drawn: Drawn) -> None:
    gains = {("mlp", "mid"): 1.0, ("attention", "mid"): 2.5, ("attention", "small"): 2.0}
    chart = drawn("ablation", sample.ablation_rows(gains))
    assert title(chart) == (
        "Among our components attention gains most on NVIDIA H200: "
        "without it a step at mid takes 1.50× the time"
    )
    svg = vl_convert.vegalite_to_svg(chart.to_dict())
    assert "1.33×" in svg and "red" not in svg
    at_mid = [name for name in re.findall(r">(attention|MLP)</text>", svg)][-2:]
    assert at_mid == ["attention", "MLP"]  # ordered by gain


def test_ablation_claims_no_gain_without_a_verdict(drawn: Drawn) -> None:
    rows = sample.ablation_rows({("mlp", "mid"): 0.05, ("attention", "mid"): "oom"})
    chart = drawn("ablation", rows)
    assert title(chart) == "No component measurably shortens our step on NVIDIA H200"
    assert "out of memory" in as_svg(chart)
    rows = sample.ablation_rows({("mlp", "mid"): 1.0}, counts=None)
    rows["ablation"][0]["base_variant"] = "sdpa_cudnn_padded"
    chart = drawn("ablation", rows)
    assert "without complete evidence" in title(chart)
    said = " ".join(chart.to_dict()["title"]["subtitle"])
    assert "PyTorch with cuDNN's attention and a padded hidden width, uncompiled" in said


def test_ablation_tells_steps_that_were_timed_apart_from_those_not_run(drawn: Drawn) -> None:
    rows = sample.ablation_rows({("mlp", "mid"): 1.0, ("attention", "mid"): 2.0})
    rows["ablation"][0] |= {"gain_alone_ms": None, "gain_last_ms": None, "without_ms": None}
    svg = as_svg(drawn("ablation", rows))
    assert svg.count("not timed together</text>") == svg.count("not run</text>") > 0


def test_matrix_groups_winners_by_variant(drawn: Drawn) -> None:
    times = {
        ("small", "sdpa_flash"): 50.0,
        ("small", "separate"): 60.0,
        ("mid", "sdpa_flash"): 100.0,
        ("mid", "separate"): 80.0,
    }
    found = title(drawn("matrix", sample.steps(times)))
    assert found == (
        "Fastest training step on NVIDIA H200: plain PyTorch at small; "
        "our deterministic attention at mid"
    )


def test_matrix_names_ties_together_and_speedup_the_winner(drawn: Drawn) -> None:
    rows = sample.steps(
        {("mid", "separate"): 80.0, ("mid", "fused"): 79.5, ("mid", "sdpa_flash"): 99.0}
    )
    assert title(drawn("matrix", rows)).endswith(
        "ours and our deterministic attention at mid (named together: equal to within 1%)"
    )
    found = re.findall(r'font-weight="bold"[^>]*>1.2[0-9]×', as_svg(drawn("speedup", rows)))
    assert len(found) == 2  # the winner alone, over its halo


def test_matrix_prefers_a_step_with_evidence_to_a_shorter_one_without(drawn: Drawn) -> None:
    times = {("mid", "sdpa_flash"): 100.0, ("mid", "separate"): 80.0}
    counted, hollow = sample.steps(times), sample.steps({**times, ("mid", "fused"): 50.0})
    counted["matrix"].append(hollow["matrix"][-1] | {"plain_valid": None, "plain_fastest": False})
    found = title(drawn("matrix", counted))
    assert found.endswith("our deterministic attention at mid")


def test_a_panel_has_no_line_for_what_was_not_run_at_its_shape(drawn: Drawn) -> None:
    times = {("small", "sdpa_flash"): 9.0, ("mid", "sdpa_flash"): 9.0, ("mid", "separate"): 8.0}
    for figure in ("speedup", "memory", "matrix"):
        svg = as_svg(drawn(figure, sample.steps(times)))
        assert "not run" not in svg
        assert len(re.findall(r">our deterministic attention</text>", svg)) == 1
        assert len(re.findall(r">plain PyTorch</text>", svg)) == 2


def test_noise_counts_the_equal_things_that_were_called_different(drawn: Drawn) -> None:
    chart = drawn("noise", sample.equal_rows([1.0, 1.02, 1.05]))
    assert title(chart) == (
        "Equal things compared: of 3 comparisons 33.3% called faster or slower, and 66.7% of the "
        "95% intervals contain 1"
    )
    many = as_svg(drawn("noise", sample.equal_rows([1 + i / 10000 for i in range(100)])))
    svg = as_svg(chart)
    assert "3; 0.50% apart" in svg  # a line is no taller for many comparisons
    assert re.search(r'height="([\d.]+)"', svg)[1] == re.search(r'height="([\d.]+)"', many)[1]


def host_title(drawn: Drawn, times: dict) -> str:
    return title(drawn("host", sample.step_host_rows(times)))


def test_host_says_what_a_launched_step_costs_and_how_far_it_is_from_its_graph(
    drawn: Drawn,
) -> None:
    times = {("pytorch_best", False): (12.8, 20.4), ("fused", False): (28.16, 25.6)}
    times |= {("fused_compiled", False): (64.0, 25.5), ("fused", True): (0.2, 16.0)}
    assert host_title(drawn, times) == (
        "At small a launched step with ours costs the host 2.20× the time of PyTorch's best, and "
        "takes 1.60× its own time as a CUDA graph"
    )
    del times["fused", True]
    assert host_title(drawn, times) == (
        "At small a launched step with ours in a compiled step costs the host 5.00× the time of "
        "PyTorch's best"
    )


def test_host_shows_why_a_form_has_no_time(drawn: Drawn) -> None:
    times = {("pytorch_best", False): (12.8, 20.4), ("fused", False): "unsupported"}
    chart = drawn("host", sample.step_host_rows(times))
    assert title(chart) == "Host time of steps and eager calls"
    said = unwrapped(chart)
    assert "because unsupported" in said and "cannot run here" in said
    assert "8 cores of Xeon 8481C" in said and "host 12.8 ms, loop 20.4 ms" in said
