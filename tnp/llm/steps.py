"""Names the implementations of a step, and makes the step of a decoder."""

from __future__ import annotations

from tnp.llm.decoder import Decoder
from tnp.llm.fused_step import FusedStep
from tnp.llm.step import Step
from tnp.llm.torch_step import TorchStep

STEPS: dict[str, type[Step]] = {"torch": TorchStep, "fused": FusedStep}
AUTO = "auto"


def step_of(decoder: Decoder, implementation: str) -> Step:
    """Returns the step of a decoder.

    Args:
        decoder: the decoder.
        implementation: a key of `STEPS`, or "auto": the last that can compute this decoder on CUDA,
            and "torch" elsewhere.

    Raises:
        ValueError: the implementation is unknown.
        RuntimeError: it cannot compute this decoder, with the reason.
    """
    if implementation == AUTO:
        usable = [one for one in STEPS.values() if one.refuses(decoder) is None]
        return (usable[-1] if decoder.device.type == "cuda" else TorchStep)(decoder)
    if implementation not in STEPS:
        raise ValueError(
            f"unknown implementation {implementation!r}: choose from {AUTO}, {', '.join(STEPS)}"
        )
    reason = STEPS[implementation].refuses(decoder)
    if reason is not None:
        raise RuntimeError(f"the step {implementation!r} cannot run here: {reason}")
    return STEPS[implementation](decoder)
