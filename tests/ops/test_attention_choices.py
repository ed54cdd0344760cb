"""Tests which implementation, kernel and configuration of attention runs where, without a GPU."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from tnp.dispatch import devices, selection, tuned_tables
from tnp.dispatch.devices import Target
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Call, Kernel, Problem
from tnp.ops.attention import FORWARD, FUSED, OPERATOR, SEPARATE

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())
H200, A100 = devices.named("nvidia-h200"), devices.named("A100")
OPERATIONS = (FORWARD, SEPARATE, FUSED)
# No table of this machine's user; a test may write one of its own.
pytestmark = pytest.mark.usefixtures("users_tables")


def problem(shape: str, dtype: str = "bfloat16", **options) -> Problem:
    run = CONFIG["shapes"][shape] | {"dtype": dtype}
    found = OPERATOR.within({"d_model": 512, "n_heads": 8}, run)
    return OPERATOR.problem(dtype, **dict(found.sizes), **options)


def call(shape: str, dtype: str = "bfloat16", target: Target = H200, **options) -> Call:
    return Call(problem(shape, dtype, **options), target, OPERATOR.differentiated)


def chosen(operation, what: Call) -> tuple[str, dict, str]:
    kernel, found = selection.choose_kernel(operation, OPERATOR, what)
    assert isinstance(kernel, Kernel) and kernel.name == found.name
    return found.name, tuned_tables.as_json(found.config), found.source


# The implementation, and which kernel serves the forward pass and each backward one. Configurations
# are the table's business.
FEW, MANY = ("few_keys",) * 3, ("hopper",) * 3
EXPECTED = {
    "small": ("separate", FEW),
    "mid": ("fused", MANY),
    "mid_b1": ("fused", MANY),
    "large": ("fused", MANY),
    "small_b1": ("fused", FEW),
    "small_b16": ("fused", FEW),
    "few_mid": ("fused", MANY),
    "odd": ("fused", MANY),
    "long_b2": ("fused", MANY),
}


def test_every_shape_of_the_configuration_has_an_expectation():
    """The grid of larger batches asks about memory."""
    shapes = CONFIG["shapes"].items()
    assert set(EXPECTED) == {name for name, x in shapes if "vary" not in x and "{" not in name}


@pytest.mark.parametrize("shape", EXPECTED)
@pytest.mark.parametrize("options", [{}, {"n_keys": True}], ids=str)
def test_implementations_and_kernels_on_an_h200(shape, options):
    """Lengths of samples change no kernel."""
    implementation, kernels = EXPECTED[shape]
    what = call(shape, **options)
    found, _ = selection.choose_implementation(OPERATOR, "auto", what)
    assert found.name == implementation
    assert found.source == ("tuned" if shape in CONFIG["tuning"]["shapes"] else "default")
    for operation, kernel in zip(OPERATIONS, kernels, strict=True):
        name, config, source = chosen(operation, what)
        assert name == kernel and source in ("tuned", "predicted")
        # Nothing is split where samples have lengths, which may be faster with another one.
        assert config == chosen(operation, call(shape))[1] or source == "predicted"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": 100}, {"n_kv_heads": 2}, {"n_sequences": 3}], ids=str
)
def test_costs_of_attention_to_all_keys_say_nothing_of_other_kinds(head_dim, options):
    """They did at D = 64, of the portable kernels alone, which then ran in place of Hopper's."""
    packed = {"cu_seqlens_q": True, "cu_seqlens_k": True} if "n_sequences" in options else {}
    sizes = {"batch": 8, "n_heads": 8, "n_q": 2048, "n_k": 2048, "head_dim": head_dim}
    asked = OPERATOR.problem("bfloat16", **sizes, **options, **packed)
    what = Call(asked, H200, OPERATOR.differentiated)
    found = [chosen(operation, what) for operation in OPERATIONS]
    assert [name for name, _, _ in found] == ["hopper"] * 3
    assert "predicted" not in {source for _, _, source in found}


def test_where_nothing_was_measured_the_default_runs():
    for shape, kernel in (("small", "few_keys"), ("mid", "triton")):
        what = call(shape, "float32")
        found, _ = selection.choose_implementation(OPERATOR, "auto", what)
        assert (found.name, found.source) == ("fused", "default")
        for operation in (SEPARATE, FUSED):
            assert chosen(operation, what)[::2] == (kernel, "default")
    assert chosen(FORWARD, call("mid", "float32"))[2] == "default"


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
def test_float16_costs_as_much_as_bfloat16(operation):
    for shape in EXPECTED:
        predicted = chosen(operation, call(shape, "float16"))
        assert predicted[2] == "predicted"
        of_bfloat16 = chosen(operation, call(shape))
        assert predicted == of_bfloat16 or of_bfloat16[2] == "tuned"


@pytest.mark.parametrize("n_keys", [False, True])
def test_an_older_gpu_runs_pytorch(n_keys):
    what = call("mid", target=A100, n_keys=n_keys)
    found, _ = selection.choose_implementation(OPERATOR, "auto", what)
    assert (found.name, found.source) == ("sdpa_flash", "default")
    assert chosen(FORWARD, what)[0] == "triton"


def test_rows_that_tma_cannot_read_are_left_to_the_portable_kernels():
    what = replace(call("mid"), aligned=False)
    for operation in OPERATIONS:
        assert chosen(operation, what)[0] == "triton"


def test_an_expanded_gradient_is_copied_and_an_expanded_input_left_to_the_portable_kernels():
    whole, expanded = torch.zeros(1, 2, 8, 64), torch.zeros(()).expand(1, 2, 8, 64)
    misaligned = torch.zeros(1, 2, 8, 65)[..., 1:]
    assert selection.aligned((whole, None), (expanded, None))
    assert not selection.aligned((whole, expanded), (whole,))
    assert not selection.aligned((whole,), (misaligned,))


def test_a_gpu_of_the_same_capability_takes_another_gpus_table():
    for shape, source in (("mid", "tuned"), ("odd", "predicted")):
        what = call(shape, target=devices.named("H100 PCIe"))
        assert chosen(FORWARD, what)[::2] == ("hopper", f"{source} on nvidia-h200")


def test_a_users_entry_comes_first():
    mine = problem("mid")
    kernel = selection.kernels_of(FORWARD)["triton"]
    config = kernel.configs(call("mid"))[1]
    tuned_tables.write(H200, [tuned_tables.entry("attention.forward", mine, "triton", config)])
    assert chosen(FORWARD, call("mid")) == ("triton", tuned_tables.as_json(config), "tuned")
    assert chosen(FORWARD, call("small"))[0] == "few_keys"


def spoiled(entry: tuned_tables.Entry, **changes) -> None:
    """Writes a table with one entry, changed in the file."""
    path = tuned_tables.write(H200, [entry])
    table = json.loads(path.read_text())
    table["entries"][0] |= changes
    path.write_text(json.dumps(table))
    tuned_tables.refresh()


NO_PROBLEM = {"op": "attention", "dtype": "bfloat16", "sizes": [1]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config": {"block_n": 7}}, "there no more"),
        ({"choice": "gone", "config": None}, "there no more"),
        ({"problem": 5}, ""),
        ({"problem": NO_PROBLEM}, ""),
    ],
)
def test_an_entry_without_its_kernel_is_passed_over_and_named_once(changes, said, caplog):
    before = chosen(FORWARD, call("mid"))
    spoiled(tuned_tables.entry("attention.forward", problem("mid"), "hopper"), **changes)
    for _ in range(2):
        assert chosen(FORWARD, call("mid")) == before
    named = [one.getMessage() for one in caplog.records if "there no more" in one.getMessage()]
    assert len(named) == bool(said) and all("11000" in one for one in named)


def test_an_entry_with_the_calls_options_comes_before_one_without():
    """Uses float32, for which nothing is predicted. Other sizes take the default."""
    for options, kernel in (({}, "triton"), ({"n_keys": True}, "few_keys")):
        config = selection.kernels_of(FUSED)[kernel].configs(call("small", "float32"))[0]
        mine = problem("small", "float32", **options)
        tuned_tables.write(H200, [tuned_tables.entry("attention.fused", mine, kernel, config)])
        expected = kernel, tuned_tables.as_json(config), "tuned"
        assert chosen(FUSED, call("small", "float32", **options)) == expected
        assert chosen(FUSED, call("small", "float32", n_keys=True)) == expected
    assert chosen(FUSED, call("small", "float32")) != expected
    assert chosen(FUSED, call("small_b1", "float32"))[2] == "default"


def test_an_entry_serves_its_own_mode_and_dtype_alone():
    mine = problem("small", "float32")
    entry = tuned_tables.entry("attention", mine, "separate") | {"mode": "training"}
    tuned_tables.write(H200, [entry])
    for wanted, dtype, source in (
        (OPERATOR.differentiated, "float32", "tuned"), ((), "float32", "default"),
        (OPERATOR.differentiated, "float16", "default"),
    ):  # fmt: skip
        what = replace(call("small", dtype), wanted=wanted)
        assert selection.choose_implementation(OPERATOR, "auto", what)[0].source == source


@pytest.mark.parametrize("mask", [{"causal": True}, {"window": 100}], ids=str)
def test_an_entry_serves_no_problem_under_another_mask(mask):
    sizes = {"batch": 64, "n_heads": 8, "n_q": 128, "n_k": 192, "head_dim": 64}
    plain, asked = (OPERATOR.problem("bfloat16", **sizes, **given) for given in ({}, mask))
    what = Call(asked, H200, OPERATOR.differentiated)
    three = next(
        one for one in selection.kernels_of(FORWARD)["hopper"].configs(what) if one.consumers == 3
    )
    tuned_tables.write(H200, [tuned_tables.entry("attention.forward", plain, "hopper", three)])
    _, config, source = chosen(FORWARD, what)
    assert (config["consumers"], source) == (2, "default")
    tuned_tables.write(H200, [tuned_tables.entry("attention.forward", asked, "hopper", three)])
    assert chosen(FORWARD, what)[1:] == (tuned_tables.as_json(three), "tuned")


def test_every_committed_entry_is_taken_where_it_was_measured():
    path = tuned_tables.COMMITTED / "nvidia-h200.json"
    operators = catalog().operators
    operations = {operation.name: operation for operation in OPERATIONS}
    entries = [
        one for one in tuned_tables.table(path) if one["of"].partition(".")[0] == "attention"
    ]
    assert entries
    for entry in entries:
        if "us" in entry:
            continue
        mine = operators["attention"].from_json(json.dumps(entry["problem"]))
        inference = entry["mode"] == "inference"
        what = Call(mine, H200, () if inference else OPERATOR.differentiated)
        if entry["of"] == "attention":
            found, _ = selection.choose_implementation(OPERATOR, "auto", what)
            assert (found.name, found.source) == (entry["choice"], "tuned")
        else:
            found = chosen(operations[entry["of"]], what)
            assert found == (entry["choice"], entry["config"], "tuned")


def test_deterministic_kernels_serve_where_asked(monkeypatch):
    monkeypatch.setattr(selection.torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert chosen(FUSED, call("mid"))[0] == "triton"
    assert chosen(SEPARATE, call("mid"))[0] == "hopper"


# ------------------------------------------------------------------------------ what is predicted


def sized(n_q: int, n_k: int, target: Target = H200, batch: int = 8, **options) -> Call:
    sizes = {"batch": batch, "n_heads": 8, "n_q": n_q, "n_k": n_k, "head_dim": 64}
    return Call(OPERATOR.problem("bfloat16", **sizes, **options), target, OPERATOR.differentiated)


def test_a_choice_sees_the_rounds_of_the_gpu_at_hand():
    """64 heads of 362 queries: 192 tiles of 128 are two rounds on 132 multiprocessors and one on
    more than 192; 128 tiles of 192 are one on both.
    """
    wide = replace(H200, multiprocessors=200)
    assert chosen(FORWARD, sized(362, 7844))[1]["consumers"] == 3
    assert chosen(FORWARD, sized(362, 7844, wide))[1]["consumers"] == 2


def test_a_split_that_lengths_forbid_is_not_predicted():
    what, counted = call("mid"), call("mid", n_keys=True)
    kernel = selection.kernels_of(FORWARD)["hopper"]
    configs = kernel.configs(what)
    assert any(kernel.counts(what, config)[3] for config in configs)
    assert not any(kernel.counts(counted, config)[3] for config in configs)


def predicts(kernel: str, index: int, us: list[float]) -> tuned_tables.Entry:
    config = selection.kernels_of(FORWARD)[kernel].configs(call("mid"))[index]
    return tuned_tables.cost_entry(
        "attention.forward", OPERATOR, problem("mid"), kernel, config, us
    )


def test_a_users_costs_come_before_the_installed_ones():
    before = chosen(FORWARD, call("odd"))
    assert before[0] == "hopper"
    tuned_tables.write(H200, [predicts("triton", 1, [1.0, 0.0, 0.0, 0.0])])
    after = chosen(FORWARD, call("odd"))
    assert after[::2] == ("triton", "predicted") and after[1]["block_m"] == 64
    tuned_tables.write(H200, [predicts("triton", 1, [1e6, 0.0, 0.0, 0.0])])  # in its place
    assert chosen(FORWARD, call("odd")) == before


@pytest.mark.parametrize(
    ("us", "said"),
    [
        ([1.0, 0.0], "counts other"),
        *((us, "is no tuned table") for us in (5.0, None, ["a", 1.0], [math.nan, 1.0], [True])),
        *((us, "is no tuned table") for us in ([5.0, math.inf], [-1.0])),
    ],
)
def test_costs_that_say_nothing_are_passed_over_and_named_once(us, said, caplog):
    before = chosen(FORWARD, call("odd"))
    spoiled(predicts("triton", 1, [1.0, 0.0, 0.0, 0.0]), us=us)
    for _ in range(2):
        assert chosen(FORWARD, call("odd")) == before
    assert len([one for one in caplog.records if said in one.getMessage()]) == 1


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
def test_committed_costs_have_the_counts_of_kernels(operation):
    kernels = selection.kernels_of(operation)
    entries = [
        one for one in tuned_tables.of_target(H200) if "us" in one and one["of"] == operation.name
    ]
    configs = {
        (name, json.dumps(tuned_tables.as_json(config)))
        for name, kernel in kernels.items()
        for n_k in (64, 128, 256, 1000)
        if kernel.refuses(sized(500, n_k)) is None
        for config in kernel.configs(sized(500, n_k))
    }
    assert {(one["choice"], json.dumps(one["config"])) for one in entries} == configs
    for entry in entries:
        kernel = kernels[entry["choice"]]
        config = kernel.configs(sized(500, 64))[0]
        assert len(kernel.counts(sized(500, 64), config)) == len(entry["us"])
        assert entry["us"][0] > 0 and min(entry["us"]) >= 0  # no size has a negative time


def test_costs_of_another_gpu_stay_for_other_operations():
    """One's own costs of the forward pass say nothing of the backward, nor of implementations."""
    mine = devices.named("H100 PCIe")
    what = replace(call("mid"), target=mine)
    backward = chosen(FUSED, what)
    automatic = selection.choose_implementation(OPERATOR, "auto", what)[0]
    assert backward[2] == "predicted on nvidia-h200"
    assert automatic.source == "tuned on nvidia-h200"
    tuned_tables.write(mine, [predicts("triton", 1, [1.0, 0.0, 0.0, 0.0])])
    assert chosen(FORWARD, what)[::2] == ("triton", "predicted")
    assert chosen(FUSED, what) == backward
    assert selection.choose_implementation(OPERATOR, "auto", what)[0] == automatic


def test_counts_are_those_of_the_launch():
    """8 tasks of 8 heads, 500 queries; 132 multiprocessors."""
    kernels = selection.kernels_of(FORWARD)
    few, many = sized(500, 60), sized(500, 1000)
    config = next(one for one in kernels["few_keys"].configs(few) if one.tiles == 3)
    assert config.block_m == 64  # 8 tiles a head, 3 programs: 192 of all heads
    assert kernels["few_keys"].counts(few, config) == (1, 64 * 8 / 132, 2)
    config = next(one for one in kernels["triton"].configs(many) if one.block_n == 128)
    load = 64 * -(-500 // config.block_m) / 132
    assert kernels["triton"].counts(many, config) == (1, load * 8, load, 8)
    config = next(one for one in kernels["hopper"].configs(many) if one.consumers == 3)
    assert kernels["hopper"].counts(many, config) == (1, 2 * 16, 192 / 132, 0)  # 2 rounds


def test_counts_of_the_backward_pass_are_those_of_the_launches():
    """8 tasks of 8 heads, 850 queries; 132 multiprocessors."""
    few, many, heads = sized(850, 60), sized(850, 1000), 64
    separate, fused = (selection.kernels_of(one) for one in (SEPARATE, FUSED))
    config = next(one for one in fused["few_keys"].configs(few) if one.block_m == 128)
    # Three programs of a head have two of 7 tiles each, and a fourth would have one.
    assert fused["few_keys"].counts(few, config) == pytest.approx((1, heads * 7 / 132, 3, 1))
    # 512 blocks of 128 keys in 4 rounds; 14 tiles of 64 queries, an even number with the padding.
    config = fused["hopper"].configs(many)[0]
    assert fused["hopper"].counts(many, config) == pytest.approx((1, 4, 4 * 14, heads * 14 / 132))
    assert separate["hopper"].counts(many, config) == fused["hopper"].counts(many, config)
    # 27 tiles of 32 queries for each of 16 blocks of 64 keys; 14 tiles of 64 queries.
    config = fused["triton"].configs(many)[0]
    assert fused["triton"].counts(many, config) == pytest.approx((
        1, heads * 16 * 27 / 132, heads * 14 * 16 / 132, heads * (16 + 14) / 132, 27,
    ))  # fmt: skip
    config = next(one for one in separate["triton"].configs(many) if one.dq.block_m == 64)
    queries = heads * 16 / 132, heads * 16 * 27 / 132, 27
    assert separate["triton"].counts(many, config) == pytest.approx((
        1, 0, *queries, heads * 14 / 132, heads * 14 * 16 / 132, 16,
    ))  # fmt: skip
    # One head of 60 keys fills no GPU: its queries are shared among programs of at least 8 tiles.
    lonely = sized(3000, 60, batch=1)
    config = next(one for one in separate["triton"].configs(lonely) if one.dq.block_m == 64)
    segments, tiles = 11, 9
    assert separate["triton"].counts(lonely, config)[:5] == pytest.approx((
        1, 1, 8 * segments / 132, 8 * 94 / 132, tiles,
    ))  # fmt: skip


def test_programs_stay_where_all_samples_take_as_long():
    configs = selection.kernels_of(FUSED)["hopper"].configs
    assert [one.persistent for one in configs(call("mid"))] == [False, True]
    for what in (call("mid", n_keys=True), call("large")):
        assert [one.persistent for one in configs(what)] == [False]


def test_each_switch_of_a_configuration_makes_a_form():
    for operation, expected in ((SEPARATE, [()]), (FUSED, [(), ("persistent",)])):
        kernels = selection.kernels_of(operation)
        found = selection.forms(kernels["hopper"], call("mid"))
        assert list(map(selection.switches, found)) == expected
        assert len(selection.forms(kernels["triton"], call("mid"))) == 1


def test_an_entry_of_the_same_sizes_comes_before_a_prediction():
    kernel = selection.kernels_of(FORWARD)["triton"]
    config = kernel.configs(call("odd"))[2]
    tuned_tables.write(
        H200, [tuned_tables.entry("attention.forward", problem("odd"), "triton", config)]
    )
    assert chosen(FORWARD, call("odd"))[::2] == ("triton", "tuned")
    assert chosen(FORWARD, call("odd", n_keys=True))[::2] == ("triton", "tuned")
    assert chosen(FORWARD, call("few_mid"))[2] == "predicted"
