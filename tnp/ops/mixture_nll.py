"""Negative log-likelihood of targets under the Gaussian mixture the heads predict.

    nll = mean over targets of −logsumexp_k(log_softmax(logit_weight)_k + log N(y; mu_k, sigma_k²))
    sigma_k = exp(log_sigma_k) + sigma_min

All of it in float32 (float64 where given float64), in log space throughout. With several output
dimensions a component is a product of independent Gaussians over them.
"""

import math

import torch

from tnp.inputs import require_floats, require_number
from tnp.ops import auto, registry, triton_mixture_nll

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_COMPONENTS = 64
MAX_D_Y = 4
# A fact of the machine: torch.compile asks once instead of tracing into drivers.
_require_supported = torch.compiler.assume_constant_result(registry.check)


def split_parameters(
    parameters: torch.Tensor, sigma_min: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., K, 1 + 2·d_y] → log weights [..., K], mu and log sigma [..., K, d_y], in float32."""
    if parameters.dtype != torch.float64:
        parameters = parameters.float()
    d_y = (parameters.shape[-1] - 1) // 2
    log_weight = torch.log_softmax(parameters[..., 0], dim=-1)
    mu, log_sigma = parameters[..., 1:].split(d_y, dim=-1)
    if sigma_min > 0.0:
        floor = torch.full_like(log_sigma, math.log(sigma_min))
        log_sigma = torch.logaddexp(log_sigma, floor)
    return log_weight, mu, log_sigma


@torch.library.custom_op("tnp::mixture_nll", mutates_args=())
def _mixture_nll(
    parameters: torch.Tensor,
    y: torch.Tensor,
    sigma_min: float,
    with_dparameters: bool,
    with_dy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss and its gradients with respect to parameters and y, each empty if not asked for."""
    with torch.cuda.device_of(parameters):  # where Triton launches
        return triton_mixture_nll.loss_and_gradients(
            parameters, y, sigma_min, with_dparameters, with_dy
        )


@_mixture_nll.register_fake
def _(parameters, y, sigma_min, with_dparameters, with_dy):
    return (
        parameters.new_empty((), dtype=torch.float32),
        parameters.new_empty(parameters.shape if with_dparameters else 0),
        y.new_empty(y.shape if with_dy else 0),
    )


@torch.library.custom_op("tnp::mixture_nll_backward", mutates_args=())
def _mixture_nll_backward(gradient: torch.Tensor, dloss: torch.Tensor) -> torch.Tensor:
    """dloss · gradient; the scalar dloss stays on the device and in float32."""
    with torch.cuda.device_of(gradient):
        return triton_mixture_nll.scaled(gradient, dloss)


@_mixture_nll_backward.register_fake
def _(gradient, dloss):
    return gradient.new_empty(gradient.shape)


def _save(ctx, inputs, output) -> None:
    _parameters, _y, _sigma_min, ctx.with_dparameters, ctx.with_dy = inputs
    _loss, dparameters, dy = output
    ctx.save_for_backward(dparameters, dy)
    ctx.mark_non_differentiable(dparameters, dy)
    ctx.set_materialize_grads(False)  # theirs would be zeros of their size


def _backward(ctx, dloss, _ddparameters, _ddy):
    if dloss is None:
        return (None,) * 5
    dparameters, dy = ctx.saved_tensors
    return (
        _mixture_nll_backward(dparameters, dloss) if ctx.with_dparameters else None,
        _mixture_nll_backward(dy, dloss) if ctx.with_dy else None,
        None,
        None,
        None,
    )


_mixture_nll.register_autograd(_backward, setup_context=_save)


def mixture_nll(
    parameters: torch.Tensor,
    y: torch.Tensor,
    sigma_min: float = 0.0,
    *,
    implementation: str = "torch",
) -> torch.Tensor:
    """Mean nats per target.

    Args:
        parameters: [..., K, 1 + 2·d_y], per component logit_weight, mu, log_sigma; bfloat16,
            float16 or float32 (float64 for `torch` only). K at most 64 and d_y at most 4 for
            `fused`.
        y: [..., d_y], at least one target.
        sigma_min: floor under every standard deviation, in units of y; a finite number, 0 for none.
        implementation: a name of `tnp.ops.registry.names("mixture_nll")`.

    Returns:
        A scalar, float32 (float64 for float64 parameters). Where a target lies so far from every
        component that its z² passes the dtype's range, it is inf, and that target's gradient NaN.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together, or no targets.
        RuntimeError: the implementation cannot run on this device and dtype.
    """
    together = parameters.dim() > 1 and y.dim() > 0 and parameters.shape[:-2] == y.shape[:-1]
    if not together or parameters.shape[-1] != 1 + 2 * y.shape[-1]:
        raise ValueError(
            f"parameters are {tuple(parameters.shape)} and y {tuple(y.shape)}: "
            "they must be [..., K, 1 + 2·d_y] and [..., d_y]"
        )
    if y.numel() == 0 or parameters.numel() == 0:
        raise ValueError(
            f"parameters are {tuple(parameters.shape)} and y {tuple(y.shape)}: "
            "the mean needs at least one target and one component"
        )
    require_number("sigma_min", sigma_min)
    if not 0 <= sigma_min < math.inf:
        raise ValueError(f"sigma_min is {sigma_min}: it must be finite and not negative")
    require_floats(parameters=parameters, y=y)
    if y.device != parameters.device:
        raise ValueError(
            f"y is on {y.device} and parameters on {parameters.device}: they must be equal"
        )
    if implementation == "auto":
        implementation = _chosen(parameters, y)
    _require_supported("mixture_nll", implementation, parameters.device, parameters.dtype)
    if implementation == "torch":
        return _torch_mixture_nll(parameters, y, sigma_min)
    _check(parameters, y, implementation)
    recorded = torch.is_grad_enabled()
    return _mixture_nll(
        parameters.contiguous(),
        y,
        float(sigma_min),
        recorded and parameters.requires_grad,
        recorded and y.requires_grad,
    )[0]


def _chosen(parameters: torch.Tensor, y: torch.Tensor) -> str:
    # Half-precision parameters too are computed with in float32.
    dtype = torch.promote_types(parameters.dtype, torch.float32)
    sizes = {"rows": math.prod(y.shape[:-1]), "n_components": parameters.shape[-2]}
    sizes["d_y"] = y.shape[-1]
    unserved = "" if y.dtype in DTYPES else f"y is {y.dtype}"
    return auto.resolve("mixture_nll", parameters.device, dtype, unserved=unserved, **sizes)


def _torch_mixture_nll(parameters: torch.Tensor, y: torch.Tensor, sigma_min: float) -> torch.Tensor:
    log_weight, mu, log_sigma = split_parameters(parameters, sigma_min)
    z = (y.unsqueeze(-2) - mu) * torch.exp(-log_sigma)
    log_normal = -0.5 * z.square() - log_sigma - 0.5 * math.log(2.0 * math.pi)
    return -torch.logsumexp(log_weight + log_normal.sum(-1), dim=-1).mean()


def _check(parameters: torch.Tensor, y: torch.Tensor, implementation: str) -> None:
    for name, x in (("parameters", parameters), ("y", y)):
        if x.dtype not in DTYPES:
            raise ValueError(
                f"{name} is {x.dtype}: it must be one of {', '.join(map(str, DTYPES))}"
            )
    if parameters.shape[-2] > MAX_COMPONENTS:
        raise ValueError(
            f"K is {parameters.shape[-2]}: {implementation!r} takes at most {MAX_COMPONENTS}"
        )
    if y.shape[-1] > MAX_D_Y:
        raise ValueError(f"d_y is {y.shape[-1]}: {implementation!r} takes at most {MAX_D_Y}")
