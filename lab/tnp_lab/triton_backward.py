"""Gives implementations in CUDA C++ the backward pass of Triton. Imports no torch."""

from tnp.dispatch.spec import Call, Operation, Operator, Reason, Support


def backward_of_triton(operator: Operator) -> tuple[Operation, Support]:
    """Returns the backward operation of implementation `triton`, and a `Support`.

    The `Support` takes all calls without gradients, and the calls that `triton` takes.
    """
    triton = next(one for one in operator.implementations if one.name == "triton")

    def supported(call: Call) -> Reason:
        reason = triton.supported(call) if call.wanted else None
        return reason and f"its backward pass is Triton's: {reason}"

    return triton.backward, supported
