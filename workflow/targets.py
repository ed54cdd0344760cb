"""Says what is wrong with a target that no rule makes, and what it may have meant."""

from collections.abc import Iterable
from pathlib import Path

from workflow.faults import unknown


def refusal(target: str, known: Iterable[str]) -> str:
    """Returns a sentence for a `target` that is not `known`, or is but for how it is written."""
    known = sorted(known)
    meant = f"figures/{Path(target).stem}.html"
    if target in known:  # Snakemake has cut off the './', or the way to this folder
        return f"write {target!r} as it stands here, with nothing in front of it"
    if target == "figures/headline.svg":
        return f"{target!r} is drawn from the recorded rows alone: run `make report`"
    if meant in known:
        return f"unknown target {target!r}: did you mean {meant!r}?"
    alike = [name for name in known if _is_in_folder(name) == _is_in_folder(target)]
    return unknown("target", target, alike)


def _is_in_folder(target: str) -> bool:
    return len(Path(target).parts) > 1
