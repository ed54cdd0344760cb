"""Runs Cut Cross-Entropy of package cut-cross-entropy (Wijmans et al., arXiv 2411.09009)."""

from torch import Tensor

from tnp.dispatch.spec import Implementation, on_cuda


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss, as its authors time it.

    By default the package leaves out gradients of classes whose probability is below a 32nd of the
    dtype's precision.
    """
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(x, weight.contiguous(), target)


LINEAR_CROSS_ENTROPY = Implementation(
    "cce",
    run=linear_cross_entropy,
    supported=on_cuda(80),
    dtypes=("bfloat16", "float16"),  # its backward takes no other
    traceable=False,
)
