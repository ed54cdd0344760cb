"""Which implementation, kernel and configuration of attention runs where: decided without a GPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tnp import choice, selection, targets
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
    kernel, found = selection.choose_kernel(operation, OPERATOR, what)
    assert isinstance(kernel, Kernel) and kernel.name == found.name
    return found.name, choice.as_json(found.config), found.source


# The implementation, and which kernel serves the forward pass and each backward one. Configurations
# are the table's business.
FEW, MANY = ("few_keys",) * 3, ("hopper",) * 3
EXPECTED = {
    "small": ("separate", FEW),
    "mid": ("fused", MANY),
    "mid_b1": ("fused", MANY),
    "large": ("fused", MANY),
    "small_b1": ("separate", ("triton", "few_keys", "few_keys")),
    "small_b16": ("separate", FEW),
    "few_mid": ("fused", MANY),
    "odd": ("fused", MANY),
    "long_b2": ("fused", MANY),
}


def test_every_shape_of_the_configuration_has_an_expectation():
    assert set(EXPECTED) == set(CONFIG["shapes"])


@pytest.mark.parametrize("shape", EXPECTED)
@pytest.mark.parametrize("options", [{}, {"n_keys": True}], ids=str)
def test_what_runs_on_an_h200(shape, options):
    """Lengths of samples change nothing but the word for it."""
    implementation, kernels = EXPECTED[shape]
    what = call(shape, **options)
    found, _ = selection.choose_implementation(OPERATOR, "auto", what)
    assert found.name == implementation
    assert found.source == ("nearest" if options else found.source) != "default"
    for operation, kernel in zip(OPERATIONS, kernels, strict=True):
        name, config, source = chosen(operation, what)
        assert name == kernel and source in ("tuned", "nearest")
        assert config == chosen(operation, call(shape))[1]


@pytest.mark.parametrize("dtype, kernel", [("float16", "hopper"), ("float32", "triton")])
def test_where_nothing_was_measured_the_default_runs(dtype, kernel):
    for shape in ("small", "mid"):
        what = call(shape, dtype)
        found, _ = selection.choose_implementation(OPERATOR, "auto", what)
        assert (found.name, found.source) == ("fused", "default")
        for operation in OPERATIONS:
            name, _, source = chosen(operation, what)
            assert (name, source) == ("few_keys" if shape == "small" else kernel, "default")


def test_an_older_gpu_runs_pytorch_unless_samples_have_lengths():
    found, _ = selection.choose_implementation(OPERATOR, "auto", call("mid", target=A100))
    assert (found.name, found.source) == ("sdpa_flash", "default")
    assert chosen(FORWARD, call("mid", target=A100))[0] == "triton"
    counted = call("mid", target=A100, n_keys=True)
    found, _ = selection.choose_implementation(OPERATOR, "auto", counted)
    assert found.name == "separate"


def test_rows_that_tma_cannot_read_are_left_to_the_portable_kernels():
    what = replace(call("mid"), aligned=False)
    for operation in OPERATIONS:
        assert chosen(operation, what)[0] == "triton"


def test_a_gpu_of_the_same_capability_takes_the_table_and_says_whose():
    what = call("mid", target=targets.named("H100 PCIe"))
    name, _, source = chosen(FORWARD, what)
    assert name == "hopper" and source.endswith("on nvidia-h200")


def test_what_a_user_tuned_comes_first():
    mine = problem("mid")
    kernel = selection.kernels_of(FORWARD)["triton"]
    config = kernel.configs(call("mid"))[1]
    choice.write(H200, [choice.entry("attention.forward", mine, "triton", config)])
    assert chosen(FORWARD, call("mid")) == ("triton", choice.as_json(config), "tuned")
    assert chosen(FORWARD, call("small"))[0] == "few_keys"


@pytest.mark.parametrize(("kernel", "config"), [("hopper", {"block_n": 7}), ("gone", None)])
def test_an_entry_of_what_is_there_no_more_is_passed_over_and_named_once(kernel, config, caplog):
    before = chosen(FORWARD, call("mid"))
    choice.write(H200, [choice.entry("attention.forward", problem("mid"), kernel, config)])
    for _ in range(2):
        assert chosen(FORWARD, call("mid")) == before
    (said,) = [one.getMessage() for one in caplog.records if "there no more" in one.getMessage()]
    assert kernel in said and "11000" in said


@pytest.mark.parametrize("content", [5, {"op": "attention", "dtype": "bfloat16", "sizes": [1]}])
def test_an_entry_whose_problem_is_none_is_passed_over(content):
    before = chosen(FORWARD, call("mid"))
    path = choice.write(H200, [choice.entry("attention.forward", problem("mid"), "triton")])
    table = json.loads(path.read_text())
    table["entries"][0]["problem"] = content
    path.write_text(json.dumps(table))
    choice.refresh()
    assert chosen(FORWARD, call("mid")) == before


def test_an_entry_of_the_same_options_comes_before_a_nearer_one_without():
    counted = problem("small", n_keys=True)
    before = chosen(FORWARD, call("small_b1"))
    config = selection.kernels_of(FORWARD)["few_keys"].configs(call("small"))[0]
    choice.write(H200, [choice.entry("attention.forward", counted, "few_keys", config)])
    assert chosen(FORWARD, call("small_b1", n_keys=True))[1] == choice.as_json(config)
    assert chosen(FORWARD, call("small_b1")) == before
    assert before[1] != choice.as_json(config)
    assert chosen(FORWARD, call("mid", n_keys=True))[0] == "hopper"


def test_every_committed_entry_is_taken_where_it_was_measured():
    path = choice.COMMITTED / "nvidia-h200.json"
    operators = catalog().operators
    operations = {operation.name: operation for operation in OPERATIONS}
    entries = [one for one in choice.table(path) if one["of"].partition(".")[0] == "attention"]
    assert entries
    for entry in entries:
        mine = operators["attention"].from_json(json.dumps(entry["problem"]))
        inference = entry["mode"] == "inference"
        what = Call(mine, H200, () if inference else OPERATOR.differentiated)
        if entry["of"] == "attention":
            found, _ = selection.choose_implementation(OPERATOR, "auto", what)
            assert (found.name, found.source) == (entry["choice"], "tuned")
        else:
            found = chosen(operations[entry["of"]], what)
            assert found == (entry["choice"], entry["config"], "tuned")


def test_what_moves_gives_way_to_what_repeats(monkeypatch):
    monkeypatch.setattr(selection.torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert chosen(FUSED, call("mid"))[0] == "triton"
    assert chosen(SEPARATE, call("mid"))[0] == "hopper"
