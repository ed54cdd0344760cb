"""Turns an exception into a row's status and a one-line reason."""

MAX_REASON = 300  # characters
# A job with such a status was ended from outside: by the time limit, or because host memory ran
# out. It may succeed another time.
TRANSIENT = ("killed", "timeout")


class Unsupported(RuntimeError):
    """Says why this configuration cannot run on this device."""


def classify(error: Exception) -> tuple[str, str]:
    """Returns status and reason of an exception raised while measuring."""
    text = str(error).strip() or "no message"
    lowered = text.lower()
    if isinstance(error, MemoryError) or "can't allocate memory" in lowered:
        return "killed", one_line(f"host memory ran out: {text}")
    if (
        type(error).__name__ == "OutOfMemoryError"  # torch's, without importing torch
        or "out of memory" in lowered
        or "cublas_status_alloc_failed" in lowered
    ):
        return "oom", one_line(text)
    if isinstance(error, (Unsupported, NotImplementedError)):
        return "unsupported", one_line(text)
    return "error", one_line(f"{type(error).__name__}: {text}")


def one_line(text: str) -> str:
    """Returns the first line with text, cut to a readable length."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[0] if lines else "no reason given"
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 1] + "…"
