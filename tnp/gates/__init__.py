"""Correctness gates: what must hold before anything is timed.

A gate of an operator's implementation is generic, `op--swiglu--triton`, and there is one of each
(`tnp.gates.operators`). Every other gate is a module here. Each yields checks.

A gate runs on the device it is asked for. On the CPU, Triton kernels run in Triton's interpreter
(the process must start with TRITON_INTERPRET=1) and each row's `mode` says so.
"""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from tnp.catalog import catalog
from tnp.contract import OWN


@dataclass(frozen=True)
class Gate:
    """A gate's place in the specification, and the operator whose implementations its checks name,
    unless a check names one itself. `ours`: it runs models whose operators are all of our own.
    """

    phase: int
    op: str = "attention"
    ours: bool = False


GENERIC = "op"  # a generic gate is op--operator--implementation
OPERATORS_PHASE = 2  # in which operators are gated, one by one
COMPILED = "kernels"  # the gate that compiles every kernel of ours

# Of the model, and of all kernels.
GATES = {
    "baseline": Gate(1),
    "centred": Gate(3),
    "batch_noise": Gate(5, ours=True),
    "skip_unread": Gate(6, ours=True),
    "checkpointing": Gate(9),
    "cuda_graphs": Gate(10),
    "ragged": Gate(10, ours=True),
    "buffer": Gate(10, ours=True),
    COMPILED: Gate(11),
}


def generic_gate(op: str, name: str) -> str:
    """The name of the gate of one implementation of an operator."""
    return f"{GENERIC}--{op}--{name}"


def generic_gates() -> list[str]:
    """One gate of each implementation that is not PyTorch's own, with which others are compared.

    Of those of other packages too, since "auto" may take them.
    """
    found = catalog()
    return [
        generic_gate(op, name)
        for op in found.operators
        for name in found.names(op)
        if found.listed(op, name).provider != "torch"
    ]


def gate(name: str) -> Gate:
    """Of a gate by its name; ValueError for one that does not exist."""
    if name in GATES:
        return GATES[name]
    if name in generic_gates():
        return Gate(OPERATORS_PHASE, name.split("--")[1])
    choices = ", ".join([*GATES, *generic_gates()])
    raise ValueError(f"unknown gate {name!r}: choose from {choices}")


def gates_of(op: str, name: str) -> list[str]:
    """Gates that prove the implementation `name` of `op`, or all of ours that "auto" may choose."""
    own = [
        listed
        for listed in (catalog().listed(op, one) for one in catalog().candidates(op, name))
        if listed.provider == OWN
    ]
    gates = [generic_gate(op, listed.name) for listed in own]
    return gates + [COMPILED] * any(listed.own and listed.own.forward for listed in own)


def gates_of_training(op: str, name: str) -> list[str]:
    """What training waits for besides, where gradients are narrower than their problem."""
    own = [catalog().listed(op, one).own for one in catalog().candidates(op, name)]
    narrow = any(one and one.precision and one.differentiable for one in own)
    return ["batch_noise"] * narrow


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
    """Gates that a step waits for with these implementations, by family, and switches."""
    gates = ["baseline"]
    for family, name in implementations.items():
        for operator in catalog().family(family):
            gates += gates_of(operator.name, name) + gates_of_training(operator.name, name)
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


def blocking_reason(rows: Iterable[dict], implementations: Mapping[str, str]) -> str | None:
    """Why `rows` of table `gates` stop what uses `implementations`; None where they do not.

    `implementations` are by operator or by family. A check that names an implementation stops only
    what uses it, or lets "auto" choose it.
    """
    used = {
        operator.name: catalog().candidates(operator.name, name)
        for key, name in implementations.items()
        for operator in catalog().operators.values()
        if key in (operator.name, operator.family)
    }
    for row in rows:
        concerned = ("", *used.get(row.get("op") or gate(row["gate"]).op, ()))
        if row["implementation"] not in concerned or row["status"] == "unsupported":
            continue
        if row["status"] != "ok":  # it raised, was killed or took too long
            return f"gate {row['gate']} did not finish: {row['reason']}"
        if not row["passed"]:
            return (
                f"gate {row['gate']} is red: {row['check']}: "
                f"{row['metric']} {row['value']:.3g}, bound {row['bound']:.3g}"
            )
    return None


def run_gate(name: str, device_type: str) -> dict[str, list[dict]]:
    """Rows of tables `gates` and `kernels` (without provenance) of gate `name` on "cuda" or "cpu".

    `kernels` is empty for a gate that compiles nothing. A gate the device cannot run gives
    one row with status "unsupported"; a gate that raises keeps the checks made so far and ends in
    a row with status "error": both with the reason.
    """
    about = gate(name)
    import torch
    import triton

    from tnp.gates.checks import Unsupported

    interpreted = "interpreter" if triton.knobs.runtime.interpret else "cpu"
    common = {
        "gate": name,
        "phase": about.phase,
        "op": about.op,
        "mode": "gpu" if device_type == "cuda" else interpreted,
    }
    # A generic gate's rows name its implementation, the one that says why it stopped as well.
    whose = "" if name in GATES else name.split("--")[2]
    rows: list[dict] = []
    tables = {"gates": rows, "kernels": []}

    def ended(status: str, reason: str) -> dict:
        reason = " ".join(reason.split())[:500]
        blank = {"implementation": "", "check": status, "metric": "", "value": None, "bound": None}
        blank |= {"implementation": whose, "problem": "", "kernel": ""}
        return common | blank | {"passed": None, "status": status, "reason": reason}

    device = torch.device(device_type)
    try:
        module = importlib.import_module(f"tnp.gates.{'operators' if whose else name}")
        made = module.checks(about.op, whose, device) if whose else module.checks(device)
        for check in made:
            fields = asdict(check)
            del fields["larger_is_better"]
            fields["op"] = check.op or about.op
            rows.append(common | fields | {"passed": check.passed, "status": "ok", "reason": ""})
        if hasattr(module, "kernel_rows"):
            tables["kernels"] = module.kernel_rows()
    except Unsupported as error:
        rows.append(ended("unsupported", str(error)))
    except Exception as error:  # whatever it is, it is this gate's result
        rows.append(ended("error", f"{type(error).__name__}: {error}"))
    return tables
