"""Tests that the generic gate is green for all of ours, and red for each fault."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.gates import marks_of
from tnp.dispatch import devices, registry
from tnp.dispatch.spec import OWN, Budget, Case, Implementation
from tnp.gates import WHOLE, Share, blocked, generic_gates, operators, run_gate
from tnp.gates.checks import Check, Unsupported
from tnp.gates.poison import Poisoned
from tnp.gates.progress import Progress
from tnp.gates.results import Setting
from tnp.ops import swiglu as package
from tnp.ops.swiglu import OPERATOR, triton_swiglu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernels(own: Implementation) -> set[str]:
    return {
        one for operation in (own.forward, own.backward) if operation for one in operation.kernels
    }


def gates() -> list:
    """Returns gates of all implementations. Some operators compare with PyTorch's BLAS.

    In the interpreter without those whose kernels are some of another's, which takes no other path.
    """
    here, found = devices.of_device(DEVICE), []
    for gate in generic_gates():
        _, op, name = gate.split("--")
        operator = registry.catalog().operator(op)
        own = {one.name: kernels(one) for one in operator.implementations}
        if here.kind != "cuda" and own.get(name) and any(own[name] < of for of in own.values()):
            continue
        multiplies = operator.work(next(iter(operator.cases(here))), "forward").flops
        marks = marks_of(gate) + [pytest.mark.blas] * bool(multiplies)
        found.append(pytest.param(gate, marks=marks))
    return found


@pytest.mark.parametrize("gate", gates())
def test_gate_is_green(gate):
    rows = run_gate(gate, DEVICE.type)["gates"]
    if [row["status"] for row in rows] == ["unsupported"]:
        pytest.skip(rows[0]["reason"])
    red = [row for row in rows if row["status"] != "unsupported" and not row["passed"]]
    assert rows and not red, "\n".join(map(str, red))


@pytest.fixture
def of_swiglu(monkeypatch):
    """Checks of SwiGLU's kernels at two cases of float32, with what is changed of it."""

    def run(
        forward=None,
        backward=None,
        implementation=None,
        name="triton",
        gate=False,
        share=WHOLE,
        **changes,
    ) -> list:
        def cases(target):
            sizes = ((7, 100), (3, 33))
            return [Case(OPERATOR.problem("float32", rows=r, width=w)) for r, w in sizes]

        operator = replace(OPERATOR, **{"cases": cases} | changes)
        if implementation is not None:
            known = [one for one in operator.implementations if one.name != implementation.name]
            operator = replace(operator, implementations=(*known, implementation))
        monkeypatch.setattr(registry, "_own_operators", lambda: [operator])
        registry.catalog.cache_clear()
        monkeypatch.setattr(operators.routes, "checks", lambda *_: iter(()))
        if forward is not None:
            monkeypatch.setattr(triton_swiglu, "FORWARD", forward)
        if backward is not None:
            monkeypatch.setattr(triton_swiglu, "BACKWARD", backward)
        if gate:  # its rows, of this much progress
            return run_gate(f"op--swiglu--{name}", DEVICE.type, gate, share)["gates"]
        made = operators.checks("swiglu", name, DEVICE)
        return [check for check in made if isinstance(check, Check)]

    yield run
    monkeypatch.undo()
    registry.catalog.cache_clear()


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        ("decode_attention", {}),
        ("attention", {"n_keys": True}),
        ("attention", {"n_sequences": 3, "cu_seqlens_q": True, "cu_seqlens_k": True}),
    ],
    ids=str,
)
def test_a_captured_launch_must_follow_its_lengths(monkeypatch, op, problem):
    """A CPU captures nothing: in place of a graph the call is made again, or, as if lengths were
    frozen in the graph, it is not.
    """
    operator = registry.catalog().operator(op)
    sizes = {name: 16 for name in operator.sizes} | {"batch": 1 if "n_sequences" in problem else 3}
    case = Case(operator.problem("float32", **sizes, **problem), (("lengths", "3,9,4"),))
    found = registry.catalog().load(op, "reference")

    def replays(again: bool) -> bool:
        def captured(results):
            once = results()
            return once, lambda: once.update(results()) if again else None

        monkeypatch.setattr(operators.routes, "_captured", captured)
        setting = Setting.of(operator, found, case, torch.device("cpu"))
        return all(check.passed for check in operators.routes.with_other_lengths(setting))

    assert replays(again=True) and not replays(again=False)


def test_a_number_out_of_range_must_be_nan_in_its_sequence_alone():
    """Red of what clamps it, and of what spoils another sequence."""
    operator = registry.catalog().operator("attention")
    sizes = {name: 8 for name in operator.sizes} | {"batch": 3}
    case = Case(operator.problem("float32", **sizes, n_keys=True), (("lengths", "3,7,4"),))
    found = registry.catalog().load("attention", "reference")
    setting = Setting.of(operator, found, case, torch.device("cpu"))

    def checked(change) -> list[str]:
        def results(inputs):
            return change(setting.results(found.run, inputs, setting.upstream), inputs["n_keys"])

        drawn = setting.results(found.run, setting.inputs, setting.upstream)
        run = SimpleNamespace(
            setting=setting, results=results, nondeterministic=set(), check=setting.check
        )
        return red(list(operators.out_of_range.checks(run, drawn)))

    def spoiled(got, n_keys):
        return got | {"dk": torch.full_like(got["dk"], float("nan"))}

    def clamped(got, n_keys):
        inputs = setting.inputs | {"n_keys": n_keys.clamp(1, 8)}
        return setting.results(found.run, inputs, setting.upstream)

    assert checked(lambda got, n_keys: got) == []
    assert len(checked(spoiled)) == len(checked(clamped)) == 2


def red(checks: list) -> list[str]:
    return [check.check for check in checks if not check.passed]


def changed(kernel, change):
    """Returns the kernel with its results passed through `change(results, inputs, n)`.

    `n` counts launches.
    """
    launches = []

    def prepare(call, config, inputs):
        launch = kernel.prepare(call, config, inputs)

        def changed_launch(inputs, scalars):
            launches.append(None)
            return change(launch(inputs, scalars), inputs, len(launches))

        return changed_launch

    return replace(kernel, prepare=prepare)


def test_without_a_fault_it_is_green_and_names_its_tests(of_swiglu):
    checks = of_swiglu()
    assert red(checks) == []
    assert {check.implementation for check in checks} == {"triton"}
    assert {check.kernel for check in checks} == {"triton, triton", ""}
    problems = {check.problem for check in checks if check.kernel}
    assert problems == {case.problem.json for case in _cases()}
    named = " ".join(check.check for check in checks)
    for what in ("y against", "dgate against", "dup alone against", "y without gradients",
                 "repeats", "memory full of NaN", "expanded", "transposed", "control"):  # fmt: skip
        assert what in named


def _cases():
    return [Case(OPERATOR.problem("float32", rows=r, width=w)) for r, w in ((7, 100), (3, 33))]


FORWARD = triton_swiglu.FORWARD


def raising(error, at_width):
    """Returns the forward kernel, which raises an error at the case of one width."""

    def prepare(call, config, inputs):
        if call.problem["width"] == at_width:
            raise error
        return FORWARD.prepare(call, config, inputs)

    return replace(FORWARD, prepare=prepare)


def test_a_gate_that_was_ended_goes_on_where_it_stopped(of_swiglu, tmp_path):
    path, ended = tmp_path / "gate.jsonl", KeyboardInterrupt()
    whole = of_swiglu(gate=Progress())
    with pytest.raises(KeyboardInterrupt):
        of_swiglu(raising(ended, 33), gate=Progress(path, "code"))
    kept = Progress.read(path)
    assert list(kept.finished) == [f"1 {_cases()[0]}"] and str(kept) == "1 of 2 cases"
    assert kept.rows == whole[: len(kept.rows)]
    with path.open("a") as file:
        file.write('{"row": {"check": "of a case that is not')  # as a kill leaves it
    # The first case is not run again, and what it has shown of the controls counts.
    said = []
    progress = Progress(path, "code", lambda one: said.append(str(one)))
    assert of_swiglu(raising(ended, 100), gate=progress) == whole
    assert said[0] == "1 of 2 cases" and said[-1] == "2 of 2 cases"
    # Progress of other code is not used.
    with pytest.raises(KeyboardInterrupt):
        of_swiglu(raising(ended, 100), gate=Progress(path, "other code"))


def test_shares_together_are_the_whole_gate(of_swiglu, tmp_path):
    whole, path = of_swiglu(gate=Progress()), tmp_path / "gate.jsonl"
    path.write_text('{"identity": "other code"}\n')
    files = [tmp_path / f"gate.{number}.jsonl" for number in range(2)]
    for number, file in enumerate(files):
        rows = of_swiglu(gate=Progress(file, "code"), share=Share(number, 2))
        assert 0 < len(rows) < len(whole)
    with files[0].open("a") as file:
        file.write('{"row": {"check": "of a case that is not finished"}}\n')
    Progress.merge(path, files)
    assert list(tmp_path.iterdir()) == [path]
    # No case is run again, and what the shares have shown of the controls counts.
    rows = of_swiglu(raising(AssertionError(), 100), gate=Progress(path, "code"))
    assert sorted(map(str, rows)) == sorted(map(str, whole))


def test_a_case_that_does_not_fit_is_left_out_with_its_reason(of_swiglu, monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    forward = raising(error, 100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 16 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 14 * 2**30)
    rows = of_swiglu(forward, gate=Progress())
    assert {row["status"] for row in rows} == {"ok", "unsupported"}
    (left_out,) = [row for row in rows if row["status"] != "ok"]
    assert left_out["check"] == f"left out, {_cases()[0]}"
    assert left_out["reason"].startswith("it does not fit this GPU of 16 GB: CUDA out of memory")
    assert blocked(rows, {"swiglu": "triton"}) is None
    assert all(row["passed"] for row in rows if row["status"] == "ok")
    # Others hold the memory: nothing is said of the case, and the gate is not finished.
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**30)
    rows = of_swiglu(forward, gate=Progress())
    assert rows[-1]["status"] == "killed" and "other processes hold 14" in rows[-1]["reason"]


def output(change):
    """Returns a change of results that passes y through `change(y, inputs, n)`."""

    def of_results(results, inputs, n):
        (y,), saved = results
        return (change(y, inputs, n),), saved

    return of_results


def wrong_by_25_roundings(gradients, inputs, n):
    dgate, dup = gradients
    return dgate, None if dup is None else dup * (1 + 3e-6)


def wrong_alone(gradients, inputs, n):
    if None not in gradients:
        return gradients
    return tuple(None if x is None else -x for x in gradients)


def nobody_asked(gradients, inputs, n):
    given = next(x for x in gradients if x is not None)
    return tuple(torch.zeros_like(given) if x is None else x for x in gradients)


@output
def moving(y, inputs, n):
    return y * (1 + n % 2 * 1.2e-7)


@output
def left_as_it_was(y, inputs, n):
    out = y.new_empty(y.shape)
    if not any(isinstance(mode, Poisoned) for mode in _get_current_dispatch_mode_stack()):
        out.zero_()  # as such memory often is, whatever was freed before
    fresh = out[-1, -1].isnan()
    out.copy_(y)
    out[-1, -1] = torch.where(fresh, out.new_tensor(float("nan")), y[-1, -1])
    return out


@output
def read_past_the_end(y, inputs, n):
    gate = inputs[0]
    size = gate.untyped_storage().nbytes() // gate.element_size()
    end = gate.storage_offset() + gate.numel()
    beyond = gate.as_strided((1,), (1,), min(end, size - 1))
    return y + (beyond if end < size else 0) * 0


@output
def input_written(y, inputs, n):
    inputs[1].detach().mul_(-1)
    return y


# A kernel, a fault, the start of a check that must turn red, and what every red check has.
FAULTS = [
    ("backward", wrong_by_25_roundings, "dup against float64", "^dup"),
    ("backward", wrong_alone, "d", "alone"),
    ("backward", lambda gradients, *_: (gradients[0], None), "dup against float64", ""),
    ("backward", nobody_asked, "laid out", "`Kernel.empty`.*alone"),
    ("forward", output(lambda y, *_: y.mT.contiguous().mT), "laid out", "laid out as `Kernel.emp"),
    ("forward", output(lambda y, *_: y.half()), "y against float64", ""),
    ("forward", left_as_it_was, "memory full of NaN", "^memory full of NaN"),
    ("forward", read_past_the_end, "memory full of NaN", "^memory full of NaN"),
    ("forward", input_written, "inputs are left alone", ""),
]


@pytest.mark.parametrize("kernel, fault, some, every", FAULTS)
def test_a_fault_is_red(of_swiglu, kernel, fault, some, every):
    found = red(of_swiglu(**{kernel: changed(getattr(triton_swiglu, kernel.upper()), fault)}))
    assert any(what.startswith(some) for what in found)
    assert all(re.search(every, what) for what in found)


def test_a_result_that_moves_between_runs_is_red_unless_it_may(of_swiglu):
    kernel = changed(triton_swiglu.FORWARD, moving)
    found = red(of_swiglu(forward=kernel, budget=Budget(10.0, 10.0)))
    assert found and all(what.startswith(("repeats", "memory")) for what in found)
    may = replace(kernel, nondeterministic=("y",))
    assert red(of_swiglu(forward=may, budget=Budget(10.0, 10.0))) == []
    far = changed(triton_swiglu.FORWARD, output(lambda y, inputs, n: y * (1 + (n == 2))))
    far = replace(far, nondeterministic=("y",))
    assert any(what.startswith("y, repeats") for what in red(of_swiglu(forward=far)))


def test_a_control_that_passes_is_red(of_swiglu):
    found = red(of_swiglu(controls={"nothing broken": OPERATOR.reference}))
    assert found == ["control must fail: nothing broken"]


def test_a_control_that_shows_in_one_case_alone_is_enough(of_swiglu):
    def wide(gate, up):
        return OPERATOR.reference(gate, up) * (1.1 if gate.shape[-1] == 100 else 1.0)

    assert red(of_swiglu(controls={"wide rows scaled": wide})) == []


def test_an_implementation_without_a_case_is_unsupported_with_the_reason(of_swiglu):
    own = Implementation("elsewhere", run=OPERATOR.reference, supported=lambda call: "not here")
    with pytest.raises(Unsupported, match="^not here$"):
        of_swiglu(implementation=own, name="elsewhere")


def test_a_function_of_ours_is_gated_too(of_swiglu):
    own = Implementation("ours", run=OPERATOR.reference)
    assert red(of_swiglu(implementation=own, name="ours")) == []

    def scaled(gate, up):
        return OPERATOR.reference(gate, up) * 1.01

    found = red(of_swiglu(implementation=replace(own, run=scaled), name="ours"))
    assert found and all("against float64" in what for what in found)


def test_an_emulated_format_is_judged_apart_from_its_kernel(of_swiglu):
    """The format holds inputs rounded to bfloat16. The kernel computes exactly with them."""

    def held(case, inputs):
        return {name: x.bfloat16().float() for name, x in inputs.items()}

    def run(gate, up):
        return OPERATOR.reference(gate.bfloat16().float(), up.bfloat16().float())

    budget = Budget(emulate=held)
    own = Implementation("narrow", run=run, budget=budget, gradients=())
    checks = of_swiglu(implementation=own, name="narrow")
    assert red(checks) == []
    assert any("y of the originals" in check.check for check in checks)
    assert red(of_swiglu(implementation=replace(own, run=OPERATOR.reference), name="narrow"))
    assert red(of_swiglu(implementation=replace(own, budget=None), name="narrow"))


@pytest.mark.parametrize("name, dtype", [("reference", "float32"), ("e4m3", "bfloat16")])
def test_a_gradient_that_must_be_zero_is_judged(name, dtype):
    """With one key, all queries have its value: dq and dk are zeros. Their terms are near 1."""
    operator = registry.catalog().operator("attention")
    found = next(one for one in operator.implementations if one.name == name)
    setting = Setting.of(operator, found, operator.case(dtype, 1, 1, 9, 1, 64), DEVICE)
    for gradient in ("dq", "dk"):
        zeros = torch.zeros_like(setting.own[gradient])
        for value, is_red in ((zeros, False), (zeros + 0.1, True)):
            judged = list(setting.judged({gradient: value}))
            assert all((ratio > bound) is is_red for _, ratio, bound in judged)


def test_a_gradient_that_pytorch_leaves_out_must_be_zero():
    """lse does not depend on v: in 8 bits neither has the emulation a dv to compare with."""
    operator = registry.catalog().operator("attention")
    found = next(one for one in operator.implementations if one.name == "e4m3")
    case = operator.case("bfloat16", 1, 1, 9, 8, 64, lse=True)
    setting = Setting.of(operator, found, case, DEVICE)
    upstream = setting.upstream
    of_lse = setting.with_upstream(lambda name, x: upstream(name, x) if name == "lse" else None)
    zeros = torch.zeros_like(setting.own["dv"])
    assert all(ratio <= bound for _, ratio, bound in of_lse.judged({"dv": zeros}))
    assert any(ratio > bound for _, ratio, bound in of_lse.judged({"dv": zeros + 0.1}))


def test_where_the_format_holds_the_inputs_a_kernel_may_round_as_its_dtype_does(of_swiglu):
    """The emulation then has no error, and the kernel's products are in another order."""
    budget = Budget(emulate=lambda case, inputs: {})
    own = Implementation("narrow", run=lambda g, up: g * up * torch.sigmoid(g), budget=budget)
    checks = of_swiglu(implementation=own, name="narrow")
    assert red(checks) == []
    assert any(c.value > 0 and "dup of the originals" in c.check for c in checks)
    far = replace(own, run=lambda gate, up: OPERATOR.reference(gate, up) * 1.01)
    found = red(of_swiglu(implementation=far, name="narrow"))
    assert any("y of the originals" in what for what in found)


def test_gradients_that_are_rounded_on_the_way_are_judged_by_their_emulation(of_swiglu):
    """Results and a third of what arrives of a gradient are rounded to bfloat16: a third of 1 too,
    and no input's format says so.
    """

    def narrow(dy):
        return (dy / 3).bfloat16().to(dy.dtype) * 3

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.bfloat16().float()

        @staticmethod
        def backward(ctx, dy):
            return narrow(dy)

    def run(gate, up):
        return Rounded.apply(OPERATOR.reference(gate, up))

    def rounded(case, inputs, upstream):
        leaves = [x.detach().double().requires_grad_() for x in inputs.values()]
        y = OPERATOR.reference(*leaves)
        dy = narrow(upstream("y", y.detach().float())).double()
        dgate, dup = torch.autograd.grad(y, leaves, dy)
        return {"y": y.detach().bfloat16().double(), "dgate": dgate, "dup": dup}

    budget = Budget(emulate=lambda case, inputs: {}, rounded=rounded)
    own = Implementation("narrow", run=run, budget=budget)
    checks = of_swiglu(implementation=own, name="narrow")
    assert red(checks) == []
    assert any("dup of the originals" in check.check for check in checks)

    def inputs_too(gate, up):
        return run(gate.bfloat16().float(), up.bfloat16().float())

    assert red(of_swiglu(implementation=replace(own, run=inputs_too), name="narrow"))
    assert red(of_swiglu(implementation=replace(own, budget=None), name="narrow"))


def test_every_own_implementation_has_a_gate():
    found = registry.catalog()
    own = {
        f"op--{op}--{name}" for op in found.operators for name in found.names(op)
        if found.listed(op, name).provider == OWN
    }  # fmt: skip
    assert own and own <= set(generic_gates())
    assert package.OPERATOR.name in found.operators
