"""Phase 4: the backward of one launch, against float64 and within PyTorch's error.

dk and dv are summed in a fixed order and repeat bit by bit; dq is added up in device memory in
whatever order programs arrive.
"""

from collections.abc import Iterator

import torch

from tnp.gates.attention_backward import gradient_checks
from tnp.gates.checks import Check
from tnp.ops.attention import FUSED


def checks(device: torch.device) -> Iterator[Check]:
    yield from gradient_checks(device, FUSED, repeatable=("dk", "dv"))
