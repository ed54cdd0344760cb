"""What is chosen from the tuned table, and that the committed table can be chosen from."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

from tnp.ops import tuning
from tnp.ops.attention.kernels import KERNELS, OPERATIONS, Problem

MID = Problem("forward", torch.bfloat16, 4, 8, 11_000, 10_000, 64, 90)
PORTABLE = replace(MID, capability=80)  # served by one kernel alone


@pytest.fixture(autouse=True)
def own_table(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "TABLE", tmp_path / "attention.json")
    tuning.write_table([])
    yield
    tuning.table.cache_clear()
    tuning.choose.cache_clear()


def entry(problem: Problem, kernel: str, config: object) -> tuning.Entry:
    return tuning.key_of(problem) | {"kernel": kernel, "config": asdict(config)}


def last(problem: Problem) -> tuple[str, object]:
    return list(tuning.candidates(problem))[-1]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_empty_table_leaves_the_default(operation):
    problem = replace(MID, operation=operation)
    first = next(
        (name, kernel)
        for (of, name), kernel in KERNELS.items()
        if of == operation and kernel.unsupported(problem) is None
    )
    choice = tuning.choose(problem)
    assert (choice.kernel, choice.source) == (first[0], "default")
    assert choice.config == first[1].configs(problem)[0]
    described = json.loads(choice.describe())
    assert described == {"kernel": choice.kernel, "source": "default"} | asdict(choice.config)


def test_the_problems_own_bucket_is_tuned_and_any_other_nearest():
    tuning.write_table([entry(MID, *last(MID))])
    for problem, source in (
        (MID, "tuned"),
        (replace(MID, n_q=8193, n_k=16_384), "tuned"),
        (replace(MID, batch=32, n_heads=1), "tuned"),
        (replace(MID, n_q=16_385), "nearest"),
        (replace(MID, batch=1), "nearest"),
        (replace(MID, dtype=torch.float16), "default"),
        (replace(MID, operation="fused"), "default"),
        (PORTABLE, "default"),
    ):
        choice = tuning.choose(problem)
        assert choice.source == source, problem
        if source != "default":
            assert (choice.kernel, choice.config) == last(MID)


def test_the_nearest_bucket_counts_every_size_by_its_ratio():
    near, far = replace(MID, n_k=40_000), replace(MID, n_q=200_000, n_k=200_000)
    kernels = ("triton", "hopper")
    for ours, others in (kernels, reversed(kernels)):
        named = [(near, ours), (far, others)]
        entries = [
            entry(problem, name, KERNELS["forward", name].configs(problem)[0])
            for problem, name in named
        ]
        tuning.write_table(entries)
        assert tuning.choose(MID).kernel == ours
        assert tuning.choose(replace(MID, n_q=200_000, n_k=100_000)).kernel == others


def test_a_kernel_that_cannot_serve_the_problem_gives_way_to_the_next_nearest():
    few, unaligned = replace(MID, n_k=64), replace(MID, aligned=False)
    few_keys = entry(few, "few_keys", KERNELS["forward", "few_keys"].configs(few)[0])
    hopper = entry(MID, "hopper", KERNELS["forward", "hopper"].configs(MID)[0])
    portable = entry(
        replace(MID, n_q=200_000), "triton", KERNELS["forward", "triton"].configs(MID)[0]
    )
    tuning.write_table([few_keys, hopper, portable])
    assert tuning.choose(few).kernel == "few_keys"
    assert tuning.choose(replace(MID, n_k=200)).kernel == "hopper"
    choice = tuning.choose(unaligned)
    assert (choice.kernel, choice.source) == ("triton", "nearest")
    tuning.write_table([few_keys, hopper])
    assert tuning.choose(unaligned).source == "default"


def test_a_configuration_that_is_no_candidate_any_more_is_not_used():
    kernel, config = last(MID)
    stale = entry(MID, kernel, config)
    stale["config"] = {name: 7 for name in stale["config"]}
    tuning.write_table([stale])
    assert tuning.choose(MID).source == "default"


def test_a_table_has_a_line_an_entry_sorted_and_the_later_of_two_counts():
    small = replace(MID, n_q=564, n_k=64)
    entries = [entry(problem, *last(problem)) for problem in (MID, small)]
    first = entry(small, *next(tuning.candidates(small)))
    tuning.write_table([first, *entries])
    lines = tuning.TABLE.read_text().splitlines()
    assert lines[0] == "[" and lines[-1] == "]" and len(lines) == 4
    assert [json.loads(line.rstrip(",")) for line in lines[1:-1]] == entries[::-1]
    assert tuning.table() == tuple(entries[::-1])


def test_a_winner_becomes_an_entry_of_its_bucket():
    kernel, config = last(MID)
    winner = {
        "operation": "forward",
        "shape": "mid",
        "dtype": "bfloat16",
        "batch": 4,
        "n_heads": 8,
        "n_q": 11_000,
        "n_k": 10_000,
        "head_dim": 64,
        "capability": 90,
        "kernel": kernel,
        "launch_config": json.dumps(asdict(config)),
    }
    assert tuning.entry_of(winner) == entry(MID, kernel, config)
    assert tuning.key_of(tuning.problem_of(tuning.entry_of(winner))) == tuning.key_of(MID)


def test_the_table_is_read_without_torch_or_triton():
    program = (
        "import sys; from tnp.ops import tuning; tuning.table(); "
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)


def test_every_committed_entry_is_a_candidate_of_its_kernel(monkeypatch):
    monkeypatch.undo()
    tuning.table.cache_clear()
    keys = [tuple(entry[name] for name in tuning.KEY) for entry in tuning.table()]
    assert keys == sorted(set(keys))
    for entry in tuning.table():
        problem = tuning.problem_of(entry)
        assert tuning.config_of(entry, problem) is not None, entry
        choice = tuning.choose(problem)
        assert (choice.kernel, choice.source) == (entry["kernel"], "tuned"), entry
