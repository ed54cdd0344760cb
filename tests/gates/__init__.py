from functools import cache
from pathlib import Path

import pytest

from workflow.configuration import read
from workflow.plan import Plan
from workflow.validation import validate

CONFIG = Path(__file__).parents[2] / "config.yaml"


@cache
def _of_all() -> set[str]:
    """Returns the gates that `make all` runs on a CPU: the ones that its jobs wait for."""
    jobs = Plan(validate(read(CONFIG)), "cpu", "cpu").jobs
    made = [*jobs["step"].values(), *jobs["train"].values()]
    return {gate for job in made for gate in job["gates"].split("|")}


def marks_of(gate: str) -> list[pytest.MarkDecorator]:
    """Returns the marks of a test that runs `gate`."""
    return [pytest.mark.of_all] * (gate in _of_all())
