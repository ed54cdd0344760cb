"""Holds correctness gates: checks that must pass before anything is timed.

Each implementation of an operator has one generic gate, such as `op--swiglu--triton`
(`tnp.gates.operators`). Every other gate is a module of this package. A gate yields checks.

A gate runs on the device it is asked for. On the CPU, Triton's interpreter runs the kernels. The
process must then start with TRITON_INTERPRET=1. Each row's `mode` says which it was.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from tnp.dispatch.registry import block_of, catalog, is_automatic
from tnp.dispatch.spec import OWN

if TYPE_CHECKING:
    from tnp.dispatch.devices import Target
    from tnp.gates.progress import Progress


@dataclass(frozen=True)
class Gate:
    """Holds a gate's phase in the specification, and the operator of its checks by default.

    `phase`: None if no phase asks for what the gate checks. `ours`: the gate runs our operators
    too. `every`: it runs every operator, and not the model's alone. `blocks`: False for a gate that
    only records a measure. Nothing waits for such a gate, and the workflow does not fail if it is
    red. `module` has the checks, with the gate's name as a second argument; without it the module
    is named as the gate. `runs`: the operators that it runs, in place of the model's.
    """

    phase: int | None
    op: str = "attention"
    ours: bool = False
    every: bool = False
    blocks: bool = True
    module: str = ""
    runs: tuple[str, ...] = ()


class Share(NamedTuple):
    """Says which cases of a generic gate a process takes: numbers that are `number` modulo `of`."""

    number: int
    of: int


WHOLE = Share(0, 1)
CASES_A_SHARE = 50  # at least; a gate with fewer than twice as many runs in one process
GENERIC = "op"  # a generic gate is op--operator--implementation
COMPILED = "kernels"  # the gate that compiles every kernel of ours; nothing waits for it
NOT_FINISHED = ("killed", "timeout")  # such a gate continues in the next run, and is not wrong

# Gates of the model, and two gates of all operators.
GATES = {
    "baseline": Gate(1),
    "tolerances": Gate(2, ours=True, every=True),  # nothing waits for it
    "centred": Gate(3),
    "batch_noise": Gate(5, ours=True, blocks=False),
    "finite": Gate(5, ours=True),
    "skip_unread": Gate(6, ours=True),
    "checkpointing": Gate(9),
    "cuda_graphs": Gate(10),
    "ragged": Gate(10, ours=True),
    "buffer": Gate(10, ours=True),
    "quantizer": Gate(None, "quantized_linear"),
    COMPILED: Gate(11, ours=True, every=True),
}
# Gates of language models, one for each kind of decoder.
_OF_A_STEP = (
    "decode_attention", "layer_norm", "quantized_linear", "rms_norm", "rope", "swiglu",
)  # fmt: skip
GATES |= {
    f"{what}--{kind}": Gate(None, "decoder", module="language", runs=_OF_A_STEP)
    for what in ("decoder", "decode")
    for kind in ("gpt2", "llama", "qwen3")
}


def generic_gate(op: str, name: str) -> str:
    """Returns the name of the gate of one implementation of an operator."""
    return f"{GENERIC}--{op}--{name}"


def generic_gates() -> list[str]:
    """Returns the gates of all implementations but PyTorch's own, the references.

    They include other packages' implementations, since "auto" may choose those.
    """
    found = catalog()
    return [
        generic_gate(op, name)
        for op in found.operators
        for name in found.names(op)
        if found.listed(op, name).provider != "torch"
    ]


def gate(name: str) -> Gate:
    """Returns a gate by its name. Raises ValueError for an unknown name."""
    if name in GATES:
        return GATES[name]
    if name in generic_gates():
        _, op, implementation = name.split("--")
        own = catalog().listed(op, implementation).own
        return Gate(catalog().operator(op).phase_of(own), op)
    choices = ", ".join([*GATES, *generic_gates()])
    raise ValueError(f"unknown gate {name!r}: choose from {choices}")


def n_shares(name: str, target: Target, most: int) -> int:
    """Returns in how many processes a gate runs side by side: on a GPU more for many cases.

    Much of a gate is Python that launches small kernels, so a GPU has room for several.
    """
    if name in GATES or target.kind != "cuda":
        return 1
    op, implementation = name.split("--")[1:]
    if catalog().listed(op, implementation).missing:  # the gate ends at once
        return 1
    n_cases = sum(1 for _ in catalog().operator(op).cases(target))
    return max(1, min(most, n_cases // CASES_A_SHARE))


def gates_of(op: str, name: str) -> list[str]:
    """Returns the gates of implementation `name`, or of all of ours that "auto" may choose."""
    listed = (catalog().listed(op, one) for one in catalog().candidates(op, name))
    return [generic_gate(op, one.name) for one in listed if one.provider == OWN]


def _is_in_8_bits(op: str, name: str) -> bool:
    own = None if is_automatic(name) else catalog().listed(op, name).own
    return own is not None and bool(own.precision)


def gates_for(
    implementations: Mapping[str, str],
    checkpoint: bool = False,
    cuda_graph: bool = False,
    skip_unread: bool = False,
    recompute: bool = False,
    ragged: bool = False,
    centred_keys: bool = False,
    buffer: bool = False,
) -> list[str]:
    """Returns the gates that a step needs for its implementations, by family, and switches."""
    gates = ["baseline"]
    for family, name in implementations.items():
        for operator in catalog().family(family):
            gates += gates_of(operator.name, name)
            gates += ["finite"] * _is_in_8_bits(operator.name, name)
    for op, name in block_of(implementations).items() if skip_unread else ():
        gates += gates_of(op, name)
    switches = {
        "skip_unread": skip_unread,
        "checkpointing": checkpoint or recompute,
        "cuda_graphs": cuda_graph,
        "ragged": ragged,
        "centred": centred_keys,
        "buffer": buffer,
    }
    gates += [gate for gate, on in switches.items() if on]
    return list(dict.fromkeys(gates))


class Blocked(NamedTuple):
    """Says why gates stop something: the status of its rows, and the reason."""

    status: str  # "gate_failed", or "killed" or "timeout" if a gate is not finished
    reason: str


def blocked(rows: Iterable[dict], implementations: Mapping[str, str]) -> Blocked | None:
    """Returns why `rows` of table `gates` stop a user of `implementations`, or None.

    `implementations` are by operator or by family. A check of one implementation stops only
    measurements that use it, or that let "auto" choose it. A red check is reported before an
    unfinished gate.
    """
    used = {
        operator.name: catalog().candidates(operator.name, name)
        for key, name in {**implementations, **block_of(implementations)}.items()
        for operator in catalog().operators.values()
        if key in (operator.name, operator.family)
    }
    unfinished = None
    for row in rows:
        concerned = ("", *used.get(row.get("op") or gate(row["gate"]).op, ()))
        if row["implementation"] not in concerned or row["status"] == "unsupported":
            continue
        if row["status"] in NOT_FINISHED:
            reason = f"gate {row['gate']} is not finished: {row['reason']}"
            unfinished = unfinished or Blocked(row["status"], reason)
        elif row["status"] != "ok":  # the gate raised
            return Blocked("gate_failed", f"gate {row['gate']} did not finish: {row['reason']}")
        elif not row["passed"]:
            return Blocked(
                "gate_failed",
                f"gate {row['gate']} is red: {row['check']}: "
                f"{row['metric']} {row['value']:.3g}, bound {row['bound']:.3g}",
            )
    return unfinished


def ended(name: str, status: str, reason: str) -> dict:
    """Returns the row of table `gates` that says why gate `name` ended before its last check."""
    about = gate(name)
    return {
        "gate": name,
        "phase": about.phase,
        "op": about.op,
        # All rows of a generic gate name its implementation.
        "implementation": "" if name in GATES else name.split("--")[2],
        "check": status,
        "metric": "",
        "value": None,
        "bound": None,
        "problem": "",
        "kernel": "",
        "passed": None,
        "status": status,
        "reason": " ".join(reason.split())[:500],
    }


def run_gate(
    name: str, device_type: str, progress: Progress | None = None, share: Share = WHOLE
) -> dict[str, list[dict]]:
    """Runs gate `name` on "cuda" or "cpu". Returns rows of tables `gates` and `kernels`.

    Rows are without provenance. `kernels` is empty if the gate compiles nothing. Three kinds of
    rows are no checks, and have a reason. A gate or case that the device cannot run has status
    "unsupported". A gate that raises keeps its checks and ends with status "error". A gate whose
    memory other processes hold ends with "killed".

    Args:
        progress: takes each row at once, and knows which parts an earlier run has finished.
        share: the cases to take, of a generic gate.
    """
    about = gate(name)
    import torch
    import triton

    from tnp.experiment.failures import classify
    from tnp.experiment.gpu_memory import Busy, why_it_does_not_fit
    from tnp.gates.checks import Finished, LeftOut, Unsupported
    from tnp.gates.progress import Progress

    progress = progress or Progress()
    interpreted = "interpreter" if triton.knobs.runtime.interpret else "cpu"
    mode = {"mode": "gpu" if device_type == "cuda" else interpreted}
    whose = "" if name in GATES else name.split("--")[2]
    device = torch.device(device_type)
    tables = {"gates": progress.rows, "kernels": []}

    def take(made: Iterable[object]) -> None:
        for one in made:
            if isinstance(one, Finished):
                progress.finish(one.part, one.of, one.found)
            elif isinstance(one, LeftOut):
                row = ended(name, "unsupported", one.reason) | mode
                about_case = {"op": json.loads(one.problem)["op"], "problem": one.problem}
                progress.row(row | about_case | {"check": f"left out, {one.case}"})
            else:
                fields = asdict(one)
                del fields["larger_is_better"]
                fields |= {"op": one.op or about.op, "passed": one.passed, "status": "ok"}
                common = {"gate": name, "phase": about.phase, "reason": ""}
                progress.row(common | mode | fields)

    try:
        home = "operators" if whose else about.module or name
        module = importlib.import_module(f"tnp.gates.{home}")
        if whose:
            take(module.checks(about.op, whose, device, progress.finished, share))
        elif about.module:
            take(module.checks(device, name))
        else:
            take(module.checks(device))
        if hasattr(module, "kernel_rows"):
            tables["kernels"] = module.kernel_rows()
    except Unsupported as error:
        progress.row(ended(name, "unsupported", str(error)) | mode)
    except Exception as error:  # any failure is this gate's result
        status, reason = "error", f"{type(error).__name__}: {error}"
        try:
            left_out = why_it_does_not_fit(error)
        except Busy as busy:
            error, left_out = busy, None
        if left_out:
            status, reason = "unsupported", left_out
        elif isinstance(error, Busy) or classify(error)[0] in NOT_FINISHED:
            status, reason = "killed", str(error)
        progress.row(ended(name, status, reason) | mode)
    return tables
