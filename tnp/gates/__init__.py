"""Correctness gates: one module a phase, each yielding the checks that must hold before timing.

A gate runs on the device it is asked for. On the CPU, Triton kernels run in Triton's interpreter
(the process must start with TRITON_INTERPRET=1) and each row's `mode` says so.
"""

import importlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Gate:
    """A gate's place in the specification and the modules it exercises (for rerun triggers)."""

    phase: int
    modules: tuple[str, ...]


_MODEL = ("tnp.model", "tnp.step", "tnp.ops.attention")
GATES = {
    "baseline": Gate(1, _MODEL),
    "attention_forward": Gate(2, ("tnp.ops.attention",)),
    "attention_backward": Gate(3, ("tnp.ops.attention",)),
    "attention_fused": Gate(4, ("tnp.ops.attention",)),
    "checkpointing": Gate(9, _MODEL),
    "cuda_graphs": Gate(10, _MODEL),
    "kernels": Gate(11, ("tnp.ops.compilation",)),
}

# Gates that prove kernels of our own, by attention implementation: others do not wait for them.
KERNEL_GATES = {
    "separate": ("attention_forward", "attention_backward", "kernels"),
    "fused": ("attention_forward", "attention_fused", "kernels"),
}


def gates_for(attention: str, checkpoint: bool = False, cuda_graph: bool = False) -> list[str]:
    """Gates a step with this attention implementation and these switches waits for."""
    gates = ["baseline", *KERNEL_GATES.get(attention, ())]
    if checkpoint:
        gates.append("checkpointing")
    if cuda_graph:
        gates.append("cuda_graphs")
    return gates


def blocking_reason(rows: Iterable[dict], implementation: str) -> str | None:
    """Why `rows` of table `gates` stop a benchmark of `implementation`; None where they do not."""
    for row in rows:
        if row["implementation"] not in ("", implementation) or row["status"] == "unsupported":
            continue
        if row["status"] == "error":
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
    if name not in GATES:
        raise ValueError(f"unknown gate {name!r}: choose from {', '.join(GATES)}")
    import torch
    import triton

    from tnp.gates.checks import Unsupported

    interpreted = "interpreter" if triton.knobs.runtime.interpret else "cpu"
    common = {
        "gate": name,
        "phase": GATES[name].phase,
        "mode": "gpu" if device_type == "cuda" else interpreted,
    }
    rows: list[dict] = []
    tables = {"gates": rows, "kernels": []}

    def ended(status: str, reason: str) -> dict:
        reason = " ".join(reason.split())[:500]
        blank = {"implementation": "", "check": status, "metric": "", "value": None, "bound": None}
        return common | blank | {"passed": None, "status": status, "reason": reason}

    try:
        module = importlib.import_module(f"tnp.gates.{name}")
        for check in module.checks(torch.device(device_type)):
            fields = asdict(check)
            del fields["larger_is_better"]
            rows.append(common | fields | {"passed": check.passed, "status": "ok", "reason": ""})
        if hasattr(module, "kernel_rows"):
            tables["kernels"] = module.kernel_rows()
    except Unsupported as error:
        rows.append(ended("unsupported", str(error)))
    except Exception as error:  # whatever it is, it is this gate's result
        rows.append(ended("error", f"{type(error).__name__}: {error}"))
    return tables
