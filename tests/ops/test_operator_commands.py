"""Tests what `python -m tnp.bench` and `python -m tnp.tuning.device` say and start."""

import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.bench.configurations import TIMING
from tnp.bench import __main__ as bench
from tnp.bench import closeness, compare, isolate, process, provenance
from tnp.bench.comparison import Comparison
from tnp.bench.measure import measure_op
from tnp.bench.outcome import failure_rows
from tnp.bench.policy import Policy
from tnp.dispatch import devices, registry
from tnp.dispatch.spec import Implementation
from tnp.ops.swiglu import OPERATOR
from tnp.tuning import device

ROOT = Path(__file__).parents[2]
ODD_ROPE = [
    "--batch",
    "1",
    "--n-heads",
    "2",
    "--n-kv-heads",
    "2",
    "--n-tokens",
    "8",
    "--head-dim",
    "7",
]
SIZES = ["--rows", "6", "--width", "40", "--dtype", "float32"]


def sentence(capsys) -> str:
    """Returns all that was said, which is one line."""
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def declared(monkeypatch):
    """Declares SwiGLU alone, with changes."""

    def declare(*own, **changes):
        known = *OPERATOR.implementations, *own
        operator = replace(OPERATOR, implementations=known, **changes)
        monkeypatch.setattr(registry, "_own_operators", lambda: [operator])
        registry.catalog.cache_clear()
        return operator

    yield declare
    monkeypatch.undo()
    registry.catalog.cache_clear()


@pytest.mark.parametrize(
    "command", ["tnp.bench --help", "tnp.bench swiglu --help", "tnp.tuning.device --help"]
)
def test_help_starts_nothing(command):
    module, *arguments = command.split()
    code = (
        "import runpy, sys\n"
        f"sys.argv[1:] = {arguments}\n"
        f"try: runpy.run_module({module!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'triton', 'pyarrow'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_sizes_and_options_are_those_that_the_operator_declares(declared, capsys):
    declared(options={"causal": bool, "window": int, "kind": ("a", "b")})
    with pytest.raises(SystemExit):
        bench.main(["swiglu", "--help"])
    said = capsys.readouterr().out
    for option in ("--rows", "--width", "--causal", "--window", "--kind {a,b}", "triton"):
        assert option in said
    assert "Times swiglu of gate, up at one size" in said


def test_options_are_part_of_the_problem(declared, monkeypatch, capsys):
    declared(
        Implementation("any", run=OPERATOR.reference, options=("kind", "window")),
        options={"causal": bool, "window": int, "kind": ("a", "b")},
        describe=lambda gate, up, **_options: OPERATOR.describe(gate, up),
    )
    asked = []

    def run_isolated(kind, parameters, timeout_s):
        asked.append(parameters)
        return {"ops": []}

    monkeypatch.setattr(isolate, "run_isolated", run_isolated)
    monkeypatch.setattr(bench, "lines", lambda *_: [])
    chosen = ["--window", "7", "--kind", "b", "--implementations", "any", "--iters", "12"]
    chosen += ["--warmup", "0.5"]
    assert bench.main(["swiglu", *SIZES, *chosen]) == 1
    (parameters,) = asked
    problem = OPERATOR.problem("float32", rows=6, width=40).json
    assert parameters["problem"] == problem.replace(
        '"op":"swiglu"', '"op":"swiglu","options":{"kind":"b","window":7}'
    )
    assert list(parameters["implementations"]) == ["any"]
    timing = Policy.from_parameters(parameters["timing"])
    assert (timing.min_samples, timing.warmup_s) == (12, 0.5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["swigloo"], "unknown operator 'swigloo': choose from "),
        (["swiglu", *SIZES, "--height", "4"], "unknown option --height"),
        (["swiglu", "--rows", "4"], "the following arguments are required: --width"),
        (["swiglu", "--rows", "0", "--width", "4"], "'0' must be a whole number, at least 1"),
        (["swiglu", *SIZES, "--implementations", "ligre"], "unknown implementation 'ligre'"),
        (["rope", *ODD_ROPE], "head_dim is 7: it must be even, for pairs of elements"),
        (["swiglu", *SIZES, "--warmup", "-1"], "'-1' must be a number of seconds, at least 0"),
        (["swiglu", *SIZES, "--suite"], "unknown option --suite"),
        (["attention", "--suite", "--batch", "3"], "its own sizes and options: leave out batch"),
        (["attention", "--suite", "--dtype", "bfloat16"], "the suite has no bfloat16"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(arguments)
    assert end.value.code == 2
    assert said in sentence(capsys)


@pytest.fixture
def here(monkeypatch):
    """Measures in this process on the CPU, for too short a time to believe the numbers."""

    def run_isolated(kind, parameters, timeout_s):
        return measure_op(parameters | {"timing": TIMING}, time.perf_counter())

    def run_child(command, parameters, timeout_s):
        assert command == ["tnp.bench.child", "closeness"]
        return {"compared": closeness.measure_closeness(parameters)}

    monkeypatch.setattr(isolate, "run_isolated", run_isolated)
    monkeypatch.setattr(process, "run_child", run_child)
    monkeypatch.setattr(provenance, "device_slug", lambda: "cpu")


def test_implementations_are_timed_or_say_why_not(declared, here, capsys):
    declared(Implementation("elsewhere", run=OPERATOR.reference, supported=lambda _: "not here"))
    names = ["--implementations", "torch", "elsewhere"]
    assert bench.main(["swiglu", *SIZES, "--both", *names]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "swiglu float32 rows=6, width=40 on cpu"
    assert "over torch" in said[-5] and said[-1].startswith(
        "over torch: its time divided by the row's"
    )
    name, provider, forward, backward, *rest = said[-4].split()
    assert (name, provider) == ("torch", "torch") and float(forward) > 0 and float(backward) > 0
    assert "GB/s" in rest and "1.00×" in rest and "yes," in rest
    assert said[-3].split() == ["elsewhere", "own", "not", "here"]


def test_compare_returns_rows_and_the_winner(declared, here):
    slow = Implementation("slow", run=lambda *x: [OPERATOR.reference(*x) for _ in range(20)][0])
    off = Implementation("off", run=lambda gate, up: OPERATOR.reference(gate, up) + 0.03125)
    declared(slow, off)
    found = compare(
        "swiglu", rows=60, width=400, implementations=["slow", "own", "torch"], dtype="float32"
    )
    assert found.names == ("slow", "off", "torch") and set(found.times_ms) == {"slow", "torch"}
    assert found.winner == "torch" and found.device == "cpu"
    rows = {row["implementation"]: row for row in found.rows}
    assert rows["slow"]["difference"] == 0 and rows["off"]["status"] == "error"


def test_compare_takes_a_string_as_one_name(here):
    sizes = {"rows": 6, "width": 40, "dtype": "float32"}
    found = compare("swiglu", implementations="torch", passes="backward", **sizes)
    assert (found.names, found.passes) == (("torch",), ("backward",))


def test_the_winner_has_numbers_and_a_failed_comparison_says_why(declared, here, monkeypatch):
    fast = Implementation("fast", run=OPERATOR.reference)
    broken = Implementation("broken", run=OPERATOR.reference)
    declared(fast, broken)

    def run_isolated(kind, parameters, timeout_s):
        rows = failure_rows(kind, parameters, "ok", "still noisy")["ops"]
        times = {"torch": 3.0, "fast": 2.0, "broken": 1.0}
        return {"ops": [row | {"time_ms_p50": times[row["implementation"]]} for row in rows]}

    def called(operator, name, *arguments, **options):
        if name == "broken":
            raise RuntimeError("no room")
        return operator.reference(*arguments) * (float("nan") if name == "fast" else 1)

    monkeypatch.setattr(isolate, "run_isolated", run_isolated)
    monkeypatch.setattr(closeness, "_called", called)
    sizes = {"rows": 6, "width": 40, "dtype": "float32"}
    found = compare("swiglu", implementations=["torch", "fast", "broken"], **sizes)
    torchs, fasts, brokens = found.rows
    assert torchs["difference"] == 0 and math.isnan(fasts["difference"])
    assert brokens["difference"] is None
    assert torchs["reason"] == fasts["reason"] == "still noisy"
    reason = "still noisy; not compared with PyTorch's: RuntimeError: no room"
    assert brokens["reason"] == reason and found.winner == "broken"
    assert replace(found, rows=found.rows[:2]).winner == "torch"  # not the faster NaN

    monkeypatch.setattr(process, "run_child", lambda *_: {"failure": ["killed", "no memory"]})
    rows = compare("swiglu", implementations="torch", **sizes).rows
    assert rows[0]["reason"].endswith("; not compared with PyTorch's: no memory")


def test_results_are_compared_with_pytorchs(declared):
    off = Implementation("off", run=lambda gate, up: OPERATOR.reference(gate, 2 * up))
    nothing = Implementation("nothing", run=lambda gate, up: gate * up * float("nan"))
    operator = declared(off, nothing)
    problem = operator.problem("float32", rows=6, width=40)
    job = {"op": "swiglu", "problem": problem.json, "device": "cpu"}
    job |= {
        "passes": ["forward", "backward"],
        "implementations": ["torch", "auto", "off", "nothing"],
    }
    rows = {(row["implementation"], row["pass"]): row["difference"]
            for row in closeness.measure_closeness(job)}  # fmt: skip
    for pass_ in job["passes"]:
        assert rows["torch", pass_] == rows["auto", pass_] == 0
        assert rows["off", pass_] > 0.1
        assert math.isnan(rows["nothing", pass_])
    assert bench._close([0.0, 1e-3]) == "yes, 1.0e-03" and bench._close([0.03]) == "no, 3.0e-02"
    assert bench._close([float("nan")]).startswith("no") and bench._close([0.0, None]) == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"op": "swigloo"}, "unknown operator 'swigloo'"),
        ({"op": "swiglu", "rows": 3}, "swiglu needs size 'width'"),
        ({"op": "swiglu", "rows": 3, "width": 4, "dtype": "int8"}, "dtype is 'int8': choose from"),
        ({"op": "swiglu", "rows": 3, "width": 4, "passes": ["both"]}, "passes is 'both': choose"),
        ({"op": "swiglu", "rows": 3, "width": 4, "warmup_s": -1}, "warmup_s is -1: it must be"),
        ({"op": "swiglu", "rows": 3, "width": 4, "warmup_s": "x"}, "warmup_s is 'x': it must be"),
        ({"op": "swiglu", "rows": 3, "width": 4, "iters": 0}, "iters is 0: it must be a whole"),
        ({"op": "swiglu", "rows": 3, "width": 4, "iters": 2.5}, "iters is 2.5: it must be a whole"),
        ({"op": "swiglu", "rows": 3, "width": 4, "iters": "3"}, "iters is '3': it must be a whole"),
        ({"op": "swiglu", "rows": 0, "width": 4}, "rows is 0: it must be a whole number, at least"),
        ({"op": "swiglu", "rows": 3, "width": 4, "passes": []}, "passes is empty: name at least"),
        ({"op": "swiglu", "rows": 3, "width": 4, "implementations": []}, "implementations is empt"),
    ],
)
def test_compare_refuses_in_one_sentence(arguments, said, monkeypatch):
    monkeypatch.setattr(isolate, "run_isolated", None)  # before any work starts
    op, rest = arguments["op"], {name: x for name, x in arguments.items() if name != "op"}
    with pytest.raises(ValueError, match=said):
        compare(op, **rest)


def test_a_suite_times_each_of_its_problems(here, monkeypatch, capsys):
    small = registry.catalog().operator("attention")
    sizes = {"batch": 1, "n_heads": 2, "n_q": 8, "n_k": 8, "head_dim": 16}

    def suite(dtype):
        return {} if dtype == "bfloat16" else {"tiny": small.problem(dtype, **sizes)}

    known = registry.catalog().operators
    monkeypatch.setitem(known, "attention", replace(small, suite=suite))
    arguments = ["attention", "--suite", "--implementations", "reference"]
    assert bench.main([*arguments, "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.count("implementation ") == 1
    assert bench.main(arguments) == 0
    said = capsys.readouterr().out
    assert said.index("attention float16 ") < said.index("attention float32 ")


def test_an_implementation_that_needs_a_gpu_waits_for_nothing(monkeypatch, capsys):
    def locked(*_):
        raise AssertionError("nothing is timed, and nothing is waited for")

    monkeypatch.setattr(process, "device_lock", locked)
    monkeypatch.setattr(provenance, "device_slug", lambda: "cpu")
    monkeypatch.setattr(devices, "here_without_gpu", lambda: devices.CPU)
    sizes = ["--rows", "6", "--width", "40"]
    assert bench.main(["rms_norm", *sizes, "--implementations", "own"]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.split()[0] == "fused" and "Triton kernels run on CUDA" in line


def test_a_table_is_printed_in_any_encoding():
    code = (
        "from tnp.util.cli import end_with\n"
        "from tnp.bench.__main__ import COLUMNS\n"
        "end_with(lambda: print(*COLUMNS, '1.00× – é') or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "forward us" in done.stdout and done.stdout.endswith("1.00x - ?\n")


def test_a_line_for_each_implementation():
    def row(name, pass_, ms, **changes):
        return {
            "implementation": name, "provider": "torch", "pass": pass_, "status": "ok",
            "reason": None, "time_ms_p50": ms, "tflops": None, "gb_per_s": 100.0,
            "max_abs_error": 1e-3, "difference": 2e-3, "precision": "",
        } | changes  # fmt: skip

    rows = [
        row("plain", "forward", 2.0), row("plain", "backward", 4.0),
        row("ours", "forward", 1.0, tflops=494.7), row("ours", "backward", 2.0, max_abs_error=2e-3),
        row("half", "forward", 1.0, difference=None),
        row("half", "backward", None, status="oom", reason="too big"),
        row("not", "forward", None, status="unsupported", reason="not here"),
        row("not", "backward", None, status="unsupported", reason="not here"),
    ]  # fmt: skip
    names, passes = ("plain", "ours", "half", "not"), ("forward", "backward")
    problem = OPERATOR.problem("bfloat16", rows=6, width=40)
    on_h200 = Comparison(problem, "nvidia-h200", names, passes, rows)
    plain, ours, half, refused = bench.lines(on_h200)
    close = "yes, 2.0e-03"
    assert plain[2:] == ["2000", "4000", "100 GB/s", "2%", "1.00×", "1.0e-03", close, ""]
    assert ours[2:] == ["1000", "2000", "494.7 TFLOP/s", "50%", "2.00×", "2.0e-03", close, ""]
    assert half[2:] == ["1000", "", "100 GB/s", "2%", "", "1.0e-03", "", "oom: too big"]
    assert refused[2:] == ["", "", "", "", "", "", "", "not here"]
    in_float32 = replace(on_h200, problem=OPERATOR.problem("float32", rows=6, width=40))
    assert bench.lines(in_float32)[1][4:6] == ["494.7 TFLOP/s", ""]
    assert bench.lines(replace(on_h200, device="cpu"))[0][4:6] == ["100 GB/s", ""]


def test_device_describes_a_gpu_and_its_implementations(declared, capsys):
    declared()
    assert device.main(["--gpu", "NVIDIA A100"]) == 0
    said = capsys.readouterr().out
    for part in ("compute capability 8.0", "163 KB", "108 multiprocessors", "312 TFLOP/s"):
        assert part in said
    assert "cp.async yes, e4m3 no, TMA no" in said
    line = next(line for line in said.splitlines() if "own" in line)
    assert line.split()[:4] == ["swiglu", "triton", "own", "yes"]
    assert "forward triton, backward triton" in line


def test_device_says_why_not(declared, capsys):
    declared()
    assert device.main(["--capability", "75"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "own" in line)
    assert line.split()[:4] == ["swiglu", "triton", "own", "no"]
    assert "it needs compute capability 8.0 or newer, this GPU has 7.5" in line


@pytest.mark.parametrize("text", ["12345", "0", "10", "99", "8.60", "A100", "sm_80a"])
def test_a_capability_that_is_none_is_one_sentence(text, capsys):
    with pytest.raises(SystemExit):
        device.main(["--capability", text])
    said = sentence(capsys)
    assert f"'{text}' is no compute capability of a GPU: choose from 5.0, " in said
    assert " 8.6, " in said


def test_architectures_with_a_form_of_their_own_are_capabilities():
    assert (device.capability("sm_90a"), device.capability("sm_120a")) == (90, 120)


@pytest.mark.parametrize("text", ["86", "8.6", "sm_86"])
def test_device_names_autos_choice_where_only_pytorch_serves(declared, text, capsys):
    declared()
    assert device.main(["--capability", text]) == 0
    said = capsys.readouterr().out
    assert "compute capability 8.6" in said and '"auto" takes PyTorch\'s operators' in said
    plain, ours = (next(line.split() for line in said.splitlines() if line.split()[1:2] == [name])
                   for name in ("torch", "triton"))  # fmt: skip
    assert plain == ["swiglu", "torch", "torch", "yes", "default"]
    assert ours[:5] == ["swiglu", "triton", "own", "yes", "forward"]


def test_device_shows_tiles_and_what_no_gate_compiles():
    operators = registry.catalog().operators

    def rows(op: str, capability: int) -> dict[str, tuple[str, ...]]:
        target = devices.of_capability(capability)
        return {row[1]: row[3:] for row in device.answers(operators[op], target)}

    assert rows("attention", 86)["portable"][2].startswith("portable_forward 128×64, ")
    assert rows("attention", 75)["portable"][0] == "no"
    assert rows("swiglu", 120)["triton"] == (
        "?",
        "",
        "",
        "no gate compiles swiglu.forward for 12.0",
    )
    assert rows("mlp", 89)["single"] == (
        "no", "", "", "its kernel needs 132 KB of shared memory, and a block of this GPU has 99 KB"
    )  # fmt: skip


@pytest.mark.parametrize("op", list(registry.catalog().operators))
def test_ours_run_on_a_cpu_or_ask_for_a_gpu(op):
    operator = registry.catalog().operator(op)
    for _, name, provider, runs, auto, _, note in device.answers(operator, devices.CPU):
        if provider == "own":
            assert (runs == "yes" or "CUDA" in note) and not auto, name


def test_device_asks_kernels_too(declared, monkeypatch):
    from tnp.ops.swiglu import triton_swiglu

    refuses = replace(triton_swiglu.BACKWARD, supported=lambda call: "too wide")
    monkeypatch.setattr(triton_swiglu, "BACKWARD", refuses)
    rows = {row[1]: row[3:] for row in device.answers(declared(), devices.named("H200"))}
    assert (rows["triton"][0], rows["triton"][-1]) == ("no", "swiglu.backward: too wide")
    assert rows["torch"] == ("yes", "", "", "")


def test_device_takes_the_first_problem_of_the_tuned_table(declared, monkeypatch):
    from tnp.dispatch import tuned_tables

    operator = declared(Implementation("narrow", run=OPERATOR.reference,
                        supported=lambda call: f"width {call.problem['width']}"))  # fmt: skip
    problem = operator.problem("bfloat16", rows=1, width=77)
    ours = tuned_tables.entry("swiglu", problem, "triton") | {"gpu": "h200"}
    entries = [ours | {"of": "other"}, ours]
    monkeypatch.setattr(tuned_tables, "of_target", lambda target: entries)
    monkeypatch.setattr(tuned_tables, "_find", lambda target, of, *_: [ours] * (of == "swiglu"))
    rows = {row[1]: row[3:] for row in device.answers(operator, devices.named("H200"))}
    assert rows["narrow"] == ("no", "", "", "width 77")
    assert rows["triton"][1] == "tuned"


def test_device_does_not_ask_other_packages_unless_told(declared, monkeypatch):
    operator = declared()
    asked = []

    def load(self):
        asked.append(self.name)
        raise ImportError("broken")

    listed = registry.catalog().listed("swiglu", "triton")
    entry = type("Entry", (), {"dist": type("D", (), {"name": "theirs", "requires": None})(),
                               "name": "swiglu.triton"})()  # fmt: skip
    monkeypatch.setattr(registry, "version", lambda name: "1.0")
    monkeypatch.setattr(registry.Listed, "implementation", property(load))
    theirs = replace(listed, own=None, entry=entry)
    problem = OPERATOR.problem("bfloat16", rows=1, width=1)
    target = devices.named("H200")
    assert device._answer(operator, theirs, problem, target, False)[0] == "?"
    assert asked == []
    answer = device._answer(operator, theirs, problem, target, True)
    assert answer == ("no", "", "ImportError: broken") and asked == ["triton"]


def test_an_unknown_gpu_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as end:
        device.main(["--gpu", "Voodoo 2"])
    assert end.value.code == 2
    said = sentence(capsys)
    assert "unknown GPU 'Voodoo 2': choose from H200" in said and "--capability 8.6" in said


@pytest.mark.parametrize(
    ("name", "capability", "multiprocessors"),
    [
        ("NVIDIA GeForce RTX 3090", 86, 82),
        ("NVIDIA GeForce RTX 3070", 86, 46),
        ("NVIDIA GeForce RTX 2080 Ti", 75, 68),
        ("NVIDIA A10", 86, 72),
        ("NVIDIA L4", 89, 58),
        ("NVIDIA L40S", 89, 142),
        ("NVIDIA A100-SXM4-40GB", 80, 108),
        ("NVIDIA H100 80GB HBM3", 90, 132),
    ],
)
def test_gpus_are_known_by_whole_words_of_their_names(name, capability, multiprocessors):
    for one in (name, devices.slug(name)):
        found = devices.named(one)
        assert (found.capability, found.multiprocessors) == (capability, multiprocessors)
    assert devices.datasheet("NVIDIA RTX A4000") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch can use the GPU")
def test_device_says_of_a_gpu_that_pytorch_cannot_use_it(monkeypatch, capsys):
    monkeypatch.setattr(provenance, "device_slug", lambda: "nvidia-h200")
    with pytest.raises(SystemExit):
        device.main([])
    assert "nvidia-h200 is here, but PyTorch" in capsys.readouterr().err
