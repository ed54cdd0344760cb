"""Ways to compute SwiGLU: a right one, one without gradients, a wrong one, one that aborts."""

import os

from tnp.dispatch.spec import Implementation


def swiglu(gate, up):
    """silu(gate) · up, in float32 inside."""
    wide = gate.float()
    return (wide * wide.sigmoid() * up.float()).to(gate.dtype)


def without_gradients(gate, up):
    """The same, with nothing for autograd."""
    return swiglu(gate, up).detach()


def wrong(gate, up):
    """A factor is missing."""
    return gate.sigmoid() * up


def aborts(gate, up):
    """As a kernel that ends the process."""
    os.abort()


THEIRS = Implementation("theirs", run=swiglu)
FORWARD_ONLY = Implementation("forward_only", run=without_gradients, gradients=())
WRONG = Implementation("wrong", run=wrong)
ABORTS = Implementation("aborts", run=aborts)
