"""Correctness gates: what must hold before anything is timed.

A gate of an operator's implementation is generic, `op--swiglu--triton`, and there is one of each
(`tnp.gates.operators`). Every other gate is a module here. Each yields checks.

A gate runs on the device it is asked for. On the CPU, Triton kernels run in Triton's interpreter
(the process must start with TRITON_INTERPRET=1) and each row's `mode` says so.
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from tnp.catalog import AUTO, catalog
from tnp.contract import OWN
from tnp.ops import registry


@dataclass(frozen=True)
class Gate:
    """A gate's place in the specification and the modules it exercises (for rerun triggers).

    `op` is the operator whose implementations its checks name, unless a check names one itself:
    attention for a gate of the model. `ours` says that it runs models whose operators are all of
    our own.
    """

    phase: int
    modules: tuple[str, ...]
    op: str = "attention"
    ours: bool = False


GENERIC = "op"  # a generic gate is op--operator--implementation
OPERATORS_PHASE = 2  # in which operators are gated, one by one

_MODEL = ("tnp.model", "tnp.step", "tnp.ops.attention")
GATES = {
    "baseline": Gate(1, _MODEL),
    "attention_forward": Gate(2, ("tnp.ops.attention",)),
    "attention_backward": Gate(3, ("tnp.ops.attention",)),
    "attention_fused": Gate(4, ("tnp.ops.attention",)),
    "embedding": Gate(6, ("tnp.ops.embedding",), "embedding"),
    "rms_norm": Gate(6, ("tnp.ops.rms_norm",), "rms_norm"),
    "projection": Gate(6, ("tnp.ops.projection",), "projection"),
    "mlp": Gate(6, ("tnp.ops.mlp",), "mlp"),
    "skip_unread": Gate(6, _MODEL, ours=True),
    "mixture_heads": Gate(7, ("tnp.ops.mixture_heads",), "mixture_heads"),
    "mixture_nll": Gate(8, ("tnp.ops.mixture_nll",), "mixture_nll"),
    "checkpointing": Gate(9, _MODEL),
    "cuda_graphs": Gate(10, _MODEL),
    "kernels": Gate(11, ("tnp.gates.compile",)),
}

# Gates that prove an implementation of an operator: those that use another do not wait for them.
KERNEL_GATES = {
    ("attention", "separate"): ("attention_forward", "attention_backward", "kernels"),
    ("attention", "fused"): ("attention_forward", "attention_fused", "kernels"),
    ("embedding", "fused"): ("embedding", "kernels"),
    ("rms_norm", "fused"): ("rms_norm", "kernels"),
    ("projection", "fused"): ("projection",),
    ("mlp", "fused"): ("mlp", "kernels"),
    ("mlp", "single"): ("mlp", "kernels"),
    ("mixture_heads", "fused"): ("mixture_heads", "kernels"),
    ("mixture_heads", "loop"): ("mixture_heads",),
    ("mixture_heads", "bmm"): ("mixture_heads",),
    ("mixture_heads", "grouped_mm"): ("mixture_heads",),
    ("mixture_nll", "fused"): ("mixture_nll", "kernels"),
}


def generic_gate(op: str, name: str) -> str:
    """The name of the gate of one implementation of an operator."""
    return f"{GENERIC}--{op}--{name}"


def generic_gates() -> list[str]:
    """One gate of each implementation that there is, but of what stands for another.

    Those of other packages too, since "auto" may take them; PyTorch's own are what others are
    compared with.
    """
    found = catalog()
    return [
        generic_gate(op, name)
        for op in found.operators
        for name in found.names(op)
        if found.listed(op, name).entry or found.listed(op, name).own.provider != "torch"
    ]


def gate(name: str) -> Gate:
    """Of a gate by its name; ValueError for one that does not exist."""
    if name in GATES:
        return GATES[name]
    if name in generic_gates():
        _, op, implementation = name.split("--")
        modules = "tnp.gates.operators", *_modules(op, implementation)
        return Gate(OPERATORS_PHASE, modules, op)
    choices = ", ".join([*GATES, *generic_gates()])
    raise ValueError(f"unknown gate {name!r}: choose from {choices}")


def _modules(op: str, name: str) -> Iterator[str]:
    """Ours that an implementation is made of; those of other packages are theirs."""
    yield catalog().operator(op).describe.__module__
    own = catalog().listed(op, name).own
    for operation in filter(None, (own and own.forward, own and own.backward)):
        yield from (path.partition(":")[0] for path in operation.kernels)


def _of_contract(op: str, name: str) -> list[str]:
    """Gates of an implementation of an operator of the catalog, or of ours that "auto" may take."""
    if name.partition(":")[0] != AUTO:
        listed = catalog().listed(op, name)
        return [generic_gate(op, name)] if listed.provider == OWN else []
    own = catalog().operator(op).implementations
    return [generic_gate(op, one.name) for one in own if one.provider == OWN and one.selectable]


def gates_of(op: str, name: str) -> list[str]:
    """Gates that prove the implementation `name` of `op`, or all that "auto" may choose."""
    if op in catalog().operators:
        return _of_contract(op, name)
    proving = [KERNEL_GATES.get((op, one), ()) for one in registry.candidates(op, name)]
    return list(dict.fromkeys(gate for gates in proving for gate in gates))


def candidates(op: str, name: str) -> tuple[str, ...]:
    """What may run where `name` is asked for: itself, or what "auto" chooses from."""
    if op not in catalog().operators:
        return registry.candidates(op, name)
    if name.partition(":")[0] != AUTO:
        return (name,)
    listed = [catalog().listed(op, one) for one in catalog().names(op)]
    return tuple(one.name for one in listed if one.own is None or one.own.selectable)


def gates_for(
    implementations: Mapping[str, str],
    checkpoint: bool = False,
    cuda_graph: bool = False,
    skip_unread: bool = False,
    recompute: bool = False,
) -> list[str]:
    """Gates that what uses these implementations (operator → name) and switches waits for."""
    gates = ["baseline"]
    for op, name in implementations.items():
        gates += gates_of(op, name)
    switches = {
        "skip_unread": skip_unread,
        "checkpointing": checkpoint or recompute,
        "cuda_graphs": cuda_graph,
    }
    gates += [gate for gate, on in switches.items() if on]
    return list(dict.fromkeys(gates))


def blocking_reason(rows: Iterable[dict], implementations: Mapping[str, str]) -> str | None:
    """Why `rows` of table `gates` stop what uses `implementations`; None where they do not.

    A check that names an implementation stops only what uses it, or lets "auto" choose it, for the
    row's operator or, where the row has none, the gate's.
    """
    used = {op: candidates(op, name) for op, name in implementations.items()}
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
