"""Phase 2: attention forward in Triton against float64, SDPA and its own error budget."""

from collections.abc import Iterator

import torch

from tnp.gates import attention_cases as cases
from tnp.gates.checks import Check, Unsupported, error_ratio, max_abs_error
from tnp.ops import registry
from tnp.ops.attention import attention

IMPLEMENTATIONS = ("separate",)
# The specification's bound, for inputs of unit variance in bfloat16.
MAX_ABS_ERROR = 1e-2
# Over PyTorch's own error in the same dtype.
OUTPUT_BUDGET = 2.0


def checks(device: torch.device) -> Iterator[Check]:
    for name in IMPLEMENTATIONS:
        try:
            registry.check("attention", name, device, torch.bfloat16)
        except RuntimeError as error:
            raise Unsupported(str(error)) from error
        for case in cases.cases(device):
            inputs, do = cases.draw(case, device)
            o, pytorch = (
                result[0] for result in (cases.run(inputs, do, name), cases.pytorch_own(inputs, do))
            )
            exact = cases.reference(inputs, do)[0]
            yield Check(
                f"o against float64, {case}", "error_ratio", error_ratio(o, pytorch, exact),
                OUTPUT_BUDGET, name,
            )  # fmt: skip
            if case.magnitude == 1:
                yield Check(
                    f"o against PyTorch, {case}", "max_abs_error", max_abs_error(o, pytorch),
                    MAX_ABS_ERROR, name,
                )  # fmt: skip
        yield from _special(device, name)


def _special(device: torch.device, name: str) -> Iterator[Check]:
    """Inputs with a known answer."""
    q = torch.randn(1, 1, 70, 64, device=device).bfloat16()
    v = torch.randn(1, 1, 70, 64, device=device).bfloat16()
    o = attention(q, torch.ones_like(v), v, implementation=name)
    mean = v.double().mean(2, keepdim=True).expand_as(o)
    yield Check(
        "all keys equal: the mean of v", "max_abs_error", max_abs_error(o, mean), 4e-3, name
    )
    k = torch.zeros_like(v)
    k[:, :, 37] = 100.0
    o = attention(torch.ones_like(q), k, v, implementation=name)
    yield Check(
        "one dominating key: its v", "max_abs_error",
        max_abs_error(o, v[:, :, 37:38].expand_as(o)), 0.0, name,
    )  # fmt: skip
