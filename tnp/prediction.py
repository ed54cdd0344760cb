"""The predictive distribution: a Gaussian mixture at every target, as a torch distribution."""

import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from tnp.ops.mixture_nll import split_parameters


class Prediction(MixtureSameFamily):
    """Gaussian mixture over y [B, N, d_y]: `mean`, `variance`, `log_prob`, `sample`, `quantile`.

    `log_prob(y)` is joint over the d_y output dimensions and has shape [B, N].
    """

    def __init__(self, parameters: torch.Tensor, sigma_min: float = 0.0) -> None:
        """`parameters` [B, N, K, 1 + 2·d_y], as the model's heads give them."""
        log_weight, mu, log_sigma = split_parameters(parameters, sigma_min)
        self.normal = Normal(mu, log_sigma.exp())
        weights = Categorical(logits=log_weight)
        super().__init__(weights, Independent(self.normal, 1), validate_args=False)

    def marginal_cdf(self, y: torch.Tensor) -> torch.Tensor:
        """P(Y ≤ y) of every output dimension by itself, shape [B, N, d_y]."""
        weights = self.mixture_distribution.probs.unsqueeze(-1)
        return (weights * self.normal.cdf(y.unsqueeze(-2))).sum(-2)

    def quantile(self, probability: float) -> torch.Tensor:
        """The y [B, N, d_y] with marginal P(Y ≤ y) = `probability`, by bisection of the CDF."""
        if not 0.0 < probability < 1.0:
            raise ValueError(f"probability is {probability}: it must lie between 0 and 1")
        # A mixture's quantile lies between the smallest and the largest of its components'.
        ends = self.normal.icdf(torch.full_like(self.normal.loc, probability))
        low, high = ends.amin(-2), ends.amax(-2)
        for _ in range(48):  # halves the bracket below float32 resolution
            middle = 0.5 * (low + high)
            below = self.marginal_cdf(middle) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return 0.5 * (low + high)
