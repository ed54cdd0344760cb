"""Lists the implementations of a step."""

from tnp.llm.decoder import Decoder
from tnp.llm.step import Step, TorchStep

STEPS: dict[str, type[Step]] = {"torch": TorchStep}


def step_of(decoder: Decoder, implementation: str) -> Step:
    """Returns the step of a decoder.

    Raises:
        ValueError: the implementation is unknown.
        RuntimeError: it cannot compute this decoder, with the reason.
    """
    if implementation not in STEPS:
        raise ValueError(
            f"unknown implementation {implementation!r}: choose from {', '.join(STEPS)}"
        )
    reason = STEPS[implementation].refuses(decoder)
    if reason is not None:
        raise RuntimeError(f"the step {implementation!r} cannot run here: {reason}")
    return STEPS[implementation](decoder)
