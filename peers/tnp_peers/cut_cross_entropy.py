"""Cut Cross-Entropy of package cut-cross-entropy (Wijmans et al., arXiv 2411.09009), in Triton."""

from torch import Tensor

from tnp.dispatch.spec import Implementation, on_cuda


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """As its authors time it: gradients of classes that are all but impossible are left out.

    That is its default filter, a 32nd of the dtype's precision.
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
