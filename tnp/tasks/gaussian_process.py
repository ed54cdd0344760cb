"""Functions drawn from a Gaussian process, whose exact posterior says how well anyone can do.

    f ~ GP(0, exp(−|x − x'|² / 2ℓ²)),  y = f(x) + ε,  ε ~ N(0, NOISE²),  ℓ ~ U[0.25, 1],
    x ~ U[−2, 2]

with a lengthscale of its own for each task of a batch. (The protocol of TNP-pytorch's 1-D
regression, Nguyen and Grover, arXiv 2207.04179, at the specification's sizes.)
"""

import math

import torch
from torch.distributions import Normal

from tnp.tasks.task import Task, check_sizes, random_generator

X_RANGE = (-2.0, 2.0)
LENGTHSCALE_RANGE = (0.25, 1.0)
NOISE = 0.1


class GaussianProcessTasks:
    """Draws tasks with d_x = d_y = 1 on `device`."""

    d_x = 1
    sigma_min = 0.0  # y is continuous: a likelihood needs no floor

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def sample(self, seed: int, step: int, batch: int, n_context: int, n_target: int) -> Task:
        """The task of (seed, step): x in [−2, 2], y of unit variance plus noise; float32.

        Raises ValueError for sizes or seeds that are no whole numbers, or too small.
        """
        check_sizes(seed, step, batch, n_context, n_target)
        generator = random_generator(self.device, seed, step)
        x, lengthscale = self._inputs(generator, batch, n_context + n_target)
        # The noise bounds the condition number by n / NOISE² = 6·10⁴, which float32 can factor;
        # cholesky_ex does not wait for the device to say so.
        factor, _ = torch.linalg.cholesky_ex(_covariance(x, x, lengthscale) + _noise(x))
        y = factor @ torch.randn(x.shape, device=self.device, generator=generator)
        return Task(x[:, :n_context], y[:, :n_context], x[:, n_context:], y[:, n_context:])

    def exact_log_likelihood(self, task: Task, seed: int, step: int) -> torch.Tensor:
        """Mean log-density of each target value under the exact posterior given the context.

        Args:
            task: what `sample(seed, step, …)` gave: the lengthscales are drawn again from there.

        Returns:
            Nats per target value of each task, [B], float64. No model exceeds its expectation.
        """
        n_points = task.n_context + task.n_target
        _, lengthscale = self._inputs(
            random_generator(self.device, seed, step), task.batch, n_points
        )
        lengthscale = lengthscale.double()
        x_context, y_context, x_target, y_target, _, _ = task.to(dtype=torch.float64)
        factor = torch.linalg.cholesky(
            _covariance(x_context, x_context, lengthscale) + _noise(x_context)
        )
        cross = torch.linalg.solve_triangular(
            factor, _covariance(x_context, x_target, lengthscale), upper=False
        )
        mean = cross.mT @ torch.linalg.solve_triangular(factor, y_context, upper=False)
        variance = 1.0 + NOISE**2 - cross.square().sum(1).unsqueeze(-1)
        return Normal(mean, variance.sqrt()).log_prob(y_target).mean((1, 2))

    def prior_log_likelihood(self, task: Task) -> torch.Tensor:
        """The same knowing nothing of the context: N(0, 1 + NOISE²). [B]."""
        prior = Normal(0.0, math.sqrt(1.0 + NOISE**2))
        return prior.log_prob(task.y_target.double()).mean((1, 2))

    def _inputs(
        self, generator: torch.Generator, batch: int, n_points: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, n_points, 1] and lengthscale [B, 1, 1], float32."""

        def uniform(shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
            unit = torch.rand(shape, device=self.device, generator=generator)
            return low + (high - low) * unit

        x = uniform((batch, n_points, 1), *X_RANGE)
        return x, uniform((batch, 1, 1), *LENGTHSCALE_RANGE)


def _covariance(a: torch.Tensor, b: torch.Tensor, lengthscale: torch.Tensor) -> torch.Tensor:
    """[B, n, 1], [B, m, 1] → [B, n, m]."""
    return torch.exp(-0.5 * ((a - b.mT) / lengthscale).square())


def _noise(x: torch.Tensor) -> torch.Tensor:
    return NOISE**2 * torch.eye(x.shape[1], device=x.device, dtype=x.dtype)
