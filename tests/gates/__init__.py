from functools import cache
from pathlib import Path

import pytest
import yaml

from workflow import plan

CONFIG = Path(__file__).parents[2] / "config.yaml"


@cache
def _of_all() -> set[str]:
    """Returns the gates that `make all` runs on a CPU: the ones that its jobs wait for."""
    config = yaml.safe_load(CONFIG.read_text())
    jobs = plan.steps(config, "cpu", "cpu") | plan.training(config, "cpu", "cpu")
    return {gate for job in jobs.values() for gate in job["gates"].split("|")}


def marks_of(gate: str) -> list[pytest.MarkDecorator]:
    """Returns the marks of a test that runs `gate`."""
    return [pytest.mark.of_all] * (gate in _of_all())
