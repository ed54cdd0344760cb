"""Offers forms of SwiGLU: a right one, one without gradients, a wrong one, one that aborts."""

import os

from tnp.dispatch.spec import Implementation


def swiglu(gate, up):
    """Returns silu(gate) · up, computed in float32."""
    wide = gate.float()
    return (wide * wide.sigmoid() * up.float()).to(gate.dtype)


def without_gradients(gate, up):
    """Returns the result without gradients."""
    return swiglu(gate, up).detach()


def wrong(gate, up):
    """Returns a wrong result: a factor is missing."""
    return gate.sigmoid() * up


def aborts(gate, up):
    """Ends the process, as a broken kernel might."""
    os.abort()


THEIRS = Implementation("theirs", run=swiglu)
FORWARD_ONLY = Implementation("forward_only", run=without_gradients, gradients=())
WRONG = Implementation("wrong", run=wrong)
ABORTS = Implementation("aborts", run=aborts)
