"""Which implementation, kernel and configuration of attention runs where: decided without a GPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tnp import choice, plans, targets
from tnp.catalog import catalog
from tnp.contract import Call, Kernel, Problem, Target
from tnp.ops.attention import FORWARD, FUSED, OPERATOR, SEPARATE

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())
H200, A100 = targets.named("nvidia-h200"), targets.named("A100")
OPERATIONS = (FORWARD, SEPARATE, FUSED)


@pytest.fixture(autouse=True)
def committed_alone(monkeypatch, tmp_path):
    """No table of this machine's user; a test may write one of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choice.refresh()
    yield
    choice.refresh()


def problem(shape: str, dtype: str = "bfloat16", **options) -> Problem:
    run = CONFIG["shapes"][shape] | {"dtype": dtype}
    found = OPERATOR.within({"d_model": 512, "n_heads": 8}, run)
    return OPERATOR.problem(dtype, **dict(found.sizes), **options)


def call(shape: str, dtype: str = "bfloat16", target: Target = H200, **options) -> Call:
    return Call(problem(shape, dtype, **options), target, OPERATOR.differentiated)


def chosen(operation, what: Call) -> tuple[str, dict, str]:
    kernel, found = plans.choose_kernel(operation, OPERATOR, what)
    assert isinstance(kernel, Kernel) and kernel.name == found.name
    return found.name, choice.as_json(found.config), found.source


# What ran before tables had this form: of few keys and of many, forward, separate and fused.
FEW = (
    {"block_m": 64, "block_n": 64, "tiles": 5, "num_warps": 4, "num_stages": 3},
    {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 3},
    {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 3},
)
MANY = (
    {"block_n": 64, "num_stages": 8, "registers": 160, "consumers": 3},
    {
        "dkdv": {"num_stages": 4, "tiles": 2, "registers": 240},
        "dq": {"block_n": 64, "num_stages": 4, "registers": 160},
    },
    {"num_stages": 4, "tiles": 1, "registers": 208},
)
EXPECTED = {
    "small": ("separate", "few_keys", "tuned"),
    "mid": ("fused", "hopper", "tuned"),
    "mid_b1": ("fused", "hopper", "tuned"),
    "large": ("fused", "hopper", "tuned"),
    "small_b1": ("separate", "few_keys", "nearest"),
    "small_b16": ("separate", "few_keys", "nearest"),
    "few_mid": ("fused", "hopper", "nearest"),
    "odd": ("fused", "hopper", "nearest"),
    "long_b2": ("fused", "hopper", "nearest"),
}


def test_every_shape_of_the_configuration_has_an_expectation():
    assert set(EXPECTED) == set(CONFIG["shapes"])


@pytest.mark.parametrize("shape", EXPECTED)
@pytest.mark.parametrize("options", [{}, {"n_keys": True}], ids=str)
def test_what_runs_on_an_h200(shape, options):
    """Lengths of samples change nothing but the word for it."""
    implementation, kernel, source = EXPECTED[shape]
    source = "nearest" if options else source
    what = call(shape, **options)
    found, _ = plans.choose_implementation(OPERATOR, "auto", what)
    assert (found.name, found.source) == (implementation, source)
    configs = FEW if kernel == "few_keys" else MANY
    for operation, config in zip(OPERATIONS, configs, strict=True):
        assert chosen(operation, what) == (kernel, config, source)


@pytest.mark.parametrize("dtype, kernel", [("float16", "hopper"), ("float32", "triton")])
def test_where_nothing_was_measured_the_default_runs(dtype, kernel):
    for shape in ("small", "mid"):
        what = call(shape, dtype)
        found, _ = plans.choose_implementation(OPERATOR, "auto", what)
        assert (found.name, found.source) == ("fused", "default")
        for operation in OPERATIONS:
            name, _, source = chosen(operation, what)
            assert (name, source) == ("few_keys" if shape == "small" else kernel, "default")


def test_an_older_gpu_runs_pytorch_unless_samples_have_lengths():
    found, _ = plans.choose_implementation(OPERATOR, "auto", call("mid", target=A100))
    assert (found.name, found.source) == ("sdpa_flash", "default")
    assert chosen(FORWARD, call("mid", target=A100))[0] == "triton"
    counted = call("mid", target=A100, n_keys=True)
    found, _ = plans.choose_implementation(OPERATOR, "auto", counted)
    assert found.name == "separate"


def test_rows_that_tma_cannot_read_are_left_to_the_portable_kernels():
    what = replace(call("mid"), aligned=False)
    for operation in OPERATIONS:
        name, _, source = chosen(operation, what)
        assert (name, source) == ("triton", "default")


def test_a_gpu_of_the_same_capability_takes_the_table_and_says_whose():
    what = call("mid", target=targets.named("H100 PCIe"))
    assert chosen(FORWARD, what)[0::2] == ("hopper", "tuned on nvidia-h200")


def test_what_a_user_tuned_comes_first():
    mine = problem("mid")
    kernel = plans.kernels_of(FORWARD)["triton"]
    config = kernel.configs(call("mid"))[1]
    choice.write(H200, [choice.entry("attention.forward", mine, "triton", config)])
    assert chosen(FORWARD, call("mid")) == ("triton", choice.as_json(config), "tuned")
    assert chosen(FORWARD, call("small"))[0] == "few_keys"


def test_a_configuration_that_is_no_candidate_any_more_is_passed_over():
    stale = choice.entry("attention.forward", problem("mid"), "hopper", {"block_n": 7})
    choice.write(H200, [stale])
    assert chosen(FORWARD, call("mid")) == ("hopper", MANY[0], "tuned")


def test_an_entry_of_the_same_options_comes_before_a_nearer_one_without():
    counted = problem("small", n_keys=True)
    config = plans.kernels_of(FORWARD)["few_keys"].configs(call("small"))[0]
    choice.write(H200, [choice.entry("attention.forward", counted, "few_keys", config)])
    assert chosen(FORWARD, call("small_b1", n_keys=True))[1] == choice.as_json(config)
    assert chosen(FORWARD, call("small_b1"))[1] == FEW[0]
    assert chosen(FORWARD, call("mid", n_keys=True))[0] == "hopper"


def test_every_committed_entry_is_taken_where_it_was_measured():
    path = choice.COMMITTED / "nvidia-h200.json"
    operators = catalog().operators
    operations = {operation.name: operation for operation in OPERATIONS}
    entries = [one for one in choice.table(path) if one["of"].partition(".")[0] == "attention"]
    assert len(entries) == 16
    for entry in entries:
        mine = operators["attention"].from_json(json.dumps(entry["problem"]))
        what = Call(mine, H200, OPERATOR.differentiated)
        if entry["of"] == "attention":
            found, _ = plans.choose_implementation(OPERATOR, "auto", what)
            assert (found.name, found.source) == (entry["choice"], "tuned")
        else:
            found = chosen(operations[entry["of"]], what)
            assert found == (entry["choice"], entry["config"], "tuned")


def test_what_moves_gives_way_to_what_repeats(monkeypatch):
    monkeypatch.setattr(plans.torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert chosen(FUSED, call("mid"))[0] == "triton"
    assert chosen(SEPARATE, call("mid"))[0] == "hopper"
