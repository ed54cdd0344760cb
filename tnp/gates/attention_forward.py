"""Phase 2: every attention forward kernel against float64 and SDPA, within its error budget."""

from collections.abc import Iterator

import torch

from tnp.gates import attention_cases as cases
from tnp.gates.checks import Check, error_ratio, max_abs_error, require_ours
from tnp.ops.attention import FORWARD, attention

# The specification's bound, for inputs of unit variance in bfloat16.
MAX_ABS_ERROR = 1e-2
# An output that moves between runs is a race.
REPEATS = {"cuda": 50, "cpu": 1}


def checks(device: torch.device) -> Iterator[Check]:
    require_ours(device)
    for case in cases.cases(device):
        inputs, do = cases.draw(case, device)
        pytorch = cases.pytorch_own(case, inputs, do)[0]
        exact = cases.reference(case, inputs, do)[0]
        floor = cases.floors(case, inputs, do)["o"]
        for kernel, config in cases.launches(FORWARD, case, inputs):
            o, _lse = cases.forward(case, inputs, kernel, config)
            yield Check(f"{kernel}: o against float64, {case}", "error_ratio",
                        error_ratio(o, pytorch, exact, floor), cases.BUDGETS["o"])  # fmt: skip
            if case.magnitude == 1 and case.n_keys is None:
                yield Check(f"{kernel}: o against PyTorch, {case}", "max_abs_error",
                            max_abs_error(o, pytorch), MAX_ABS_ERROR)  # fmt: skip
            repeats = REPEATS[device.type]
            difference = max(
                max_abs_error(cases.forward(case, inputs, kernel, config)[0], o)
                for _ in range(repeats)
            )
            yield Check(f"{kernel}: repeats: {repeats}, {case}", "max_abs_difference",
                        difference, 0.0)  # fmt: skip
    for implementation in ("separate", "fused"):
        yield from _special(device, implementation)


def _special(device: torch.device, name: str) -> Iterator[Check]:
    """Inputs with a known answer."""
    for n_k in (70, 200):
        q = torch.randn(1, 1, 70, 64, device=device).bfloat16()
        v = torch.randn(1, 1, n_k, 64, device=device).bfloat16()
        o = attention(q, torch.ones_like(v), v, implementation=name)
        mean = v.double().mean(2, keepdim=True).expand_as(o)
        yield Check(f"all {n_k} keys equal: the mean of v", "max_abs_error",
                    max_abs_error(o, mean), 4e-3, name)  # fmt: skip
        k = torch.zeros_like(v)
        k[:, :, 37] = 100.0
        o = attention(torch.ones_like(q), k, v, implementation=name)
        yield Check(f"one of {n_k} keys dominates: its v", "max_abs_error",
                    max_abs_error(o, v[:, :, 37:38].expand_as(o)), 0.0, name)  # fmt: skip
