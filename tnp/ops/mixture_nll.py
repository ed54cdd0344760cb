"""Negative log-likelihood of targets under the Gaussian mixture the heads predict.

    nll = mean over targets of −logsumexp_k(log_softmax(logit_weight)_k + log N(y; mu_k, sigma_k²))
    sigma_k = exp(log_sigma_k) + sigma_min

All of it in float32 (float64 where given float64), in log space throughout. With several output
dimensions a component is a product of independent Gaussians over them.
"""

import math

import torch


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


def mixture_nll(parameters: torch.Tensor, y: torch.Tensor, sigma_min: float = 0.0) -> torch.Tensor:
    """Mean nats per target.

    Args:
        parameters: [..., K, 1 + 2·d_y], per component logit_weight, mu, log_sigma; any float dtype.
        y: [..., d_y].
        sigma_min: floor under every standard deviation, in units of y.

    Returns:
        A scalar, float32 (float64 for float64 parameters).
    """
    log_weight, mu, log_sigma = split_parameters(parameters, sigma_min)
    z = (y.unsqueeze(-2) - mu) * torch.exp(-log_sigma)
    log_normal = -0.5 * z.square() - log_sigma - 0.5 * math.log(2.0 * math.pi)
    return -torch.logsumexp(log_weight + log_normal.sum(-1), dim=-1).mean()
