"""Runs every gate of the model on this device, except those that run elsewhere."""

import pytest
import torch

from tests.gates import marks_of
from tnp.gates import GATES, run_gate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Compiled by tests/gates/test_compile.py, run by `make all`, and a measure that is red for 8 bits,
# which tests/gates/test_batch_noise.py tests.
ELSEWHERE = {"kernels", "checkpointing", "batch_noise"}


@pytest.mark.parametrize(
    "gate", [pytest.param(gate, marks=marks_of(gate)) for gate in GATES if gate not in ELSEWHERE]
)
def test_gate(gate):
    rows = run_gate(gate, DEVICE)["gates"]
    if rows[0]["status"] == "unsupported":
        pytest.skip(rows[0]["reason"])
    red = [row for row in rows if row["status"] != "unsupported" and not row["passed"]]
    assert rows and not red, "\n".join(map(str, red))
