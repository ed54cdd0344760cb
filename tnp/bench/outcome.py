"""A measurement that did not happen is a result: rows with a status and a one-line reason."""

from tnp.ops import registry
from tnp.schemas import OP_KEY, STEP_KEY

MAX_REASON = 300

# The device's own limits, through PyTorch: no implementations to choose from, no backward pass.
CEILINGS = ("matmul", "copy")


class Unsupported(RuntimeError):
    """This configuration cannot run on this device; the message says why."""


def require_supported(op: str, implementation: str, device, dtype) -> None:
    """Raises Unsupported with the registry's reason if it cannot run on this device and dtype."""
    try:
        registry.check(op, implementation, device, dtype)
    except RuntimeError as error:
        raise Unsupported(str(error)) from error


def key(kind: str, parameters: dict) -> dict[str, object]:
    """The key columns of a "step" or "op" row; sizes an operator does not have are null."""
    columns = STEP_KEY if kind == "step" else OP_KEY
    return {name: parameters.get(name) for name, _ in columns}


def failure_rows(
    kind: str, parameters: dict, status: str, reason: str
) -> dict[str, list[dict[str, object]]]:
    """Table → rows saying that the configuration was not measured, one row a pass."""
    outcome = {"status": status, "reason": one_line(reason)}
    if kind == "step":
        return {"steps": [key(kind, parameters) | outcome]}
    passes = ("forward",) if parameters["op"] in CEILINGS else ("forward", "backward")
    return {"ops": [key(kind, parameters) | {"pass": pass_} | outcome for pass_ in passes]}


def classify(error: Exception) -> tuple[str, str]:
    """Status and reason of an exception raised while measuring."""
    text = str(error).strip() or "no message"
    lowered = text.lower()
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's, without importing torch
        or "out of memory" in lowered
        or "can't allocate memory" in lowered
        or "cublas_status_alloc_failed" in lowered
    ):
        return "oom", one_line(text)
    if isinstance(error, Unsupported):
        return "unsupported", one_line(text)
    return "error", one_line(f"{type(error).__name__}: {text}")


def one_line(text: str) -> str:
    """The first line that says something, cut to a readable length."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[0] if lines else "no reason given"
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 1] + "…"
