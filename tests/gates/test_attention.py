"""The gates of attention on this device, each as a whole."""

import pytest
import torch

from tnp.gates import attention_backward, attention_forward, attention_fused

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.blas
@pytest.mark.parametrize("gate", [attention_forward, attention_backward, attention_fused])
def test_gate(gate):
    red = [check for check in gate.checks(DEVICE) if not check.passed]
    assert not red, "\n".join(map(str, red))
