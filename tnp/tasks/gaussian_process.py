"""Draws functions from a Gaussian process, whose exact posterior bounds every model's likelihood.

    f ~ GP(0, s² exp(−|x − x'|² / 2ℓ²)),  y = f(x) + ε,  ε ~ N(0, noise²),  x ~ U[−2, 2]

Each task of a batch has its own lengthscale ℓ and scale s. (1-D regression as in TNP-pytorch,
Nguyen and Grover, arXiv 2207.04179.)
"""

import math
from dataclasses import dataclass

import torch
from torch.distributions import Normal

from tnp.tasks.task import Task, check_sizes, random_generator

X_RANGE = (-2.0, 2.0)


@dataclass(frozen=True)
class Process:
    """Holds the ranges of a task's lengthscale and scale, and the noise's deviation."""

    lengthscale: tuple[float, float]
    scale: tuple[float, float]
    noise: float


SMOOTH = Process((0.25, 1.0), (1.0, 1.0), 0.1)  # for many targets, at the specification's sizes
# The protocol of TNP-pytorch: 3 to 46 context points, at most 50 with the targets. Exact posteriors
# reach 1.525 nats a target there, and TNP-pytorch's TNP-D about 1.39.
PUBLISHED = Process((0.1, 0.6), (0.1, 1.0), 0.02)


class GaussianProcessTasks:
    """Draws tasks with d_x = d_y = 1 of a `process` on `device`."""

    d_x = 1
    sigma_min = 0.0  # y is continuous: a likelihood needs no floor

    def __init__(self, device: torch.device | str = "cpu", process: Process = SMOOTH) -> None:
        self.device, self.process = torch.device(device), process

    def sample(self, seed: int, step: int, batch: int, n_context: int, n_target: int) -> Task:
        """Draws the task of (seed, step): x in [−2, 2], and y with noise, in float32.

        Raises ValueError for sizes or seeds that are no whole numbers, or too small.
        """
        sizes = check_sizes(seed, step, batch, n_context, n_target)
        seed, step, batch, n_context, n_target = sizes
        generator = random_generator(self.device, seed, step)
        x, lengthscale, scale = self._inputs(generator, batch, n_context + n_target)
        # The noise bounds the condition number by n·s² / noise², 6·10⁴ for SMOOTH with 600 points,
        # which float32 can factor. cholesky_ex does not wait for the device to check it.
        covariance = _covariance(x, x, lengthscale, scale) + self._noise(x)
        factor, _ = torch.linalg.cholesky_ex(covariance)
        y = factor @ torch.randn(x.shape, device=self.device, generator=generator)
        return Task(x[:, :n_context], y[:, :n_context], x[:, n_context:], y[:, n_context:])

    def exact_log_likelihood(self, task: Task, seed: int, step: int) -> torch.Tensor:
        """Returns the mean log-density of each target value under the exact posterior.

        Args:
            task: the result of `sample(seed, step, …)`. Lengthscales and scales are drawn again.

        Returns:
            Nats per target value of each task, [B], float64. No model's expectation is larger.
        """
        n_points = task.n_context + task.n_target
        generator = random_generator(self.device, seed, step)
        _, *kernel = self._inputs(generator, task.batch, n_points)
        lengthscale, scale = (x.double() for x in kernel)
        x_context, y_context, x_target, y_target, _, _ = task.to(dtype=torch.float64)
        factor = torch.linalg.cholesky(
            _covariance(x_context, x_context, lengthscale, scale) + self._noise(x_context)
        )
        cross = torch.linalg.solve_triangular(
            factor, _covariance(x_context, x_target, lengthscale, scale), upper=False
        )
        mean = cross.mT @ torch.linalg.solve_triangular(factor, y_context, upper=False)
        explained = cross.square().sum(1).unsqueeze(-1)
        variance = scale.square() + self.process.noise**2 - explained
        return Normal(mean, variance.sqrt()).log_prob(y_target).mean((1, 2))

    def prior_log_likelihood(self, task: Task) -> torch.Tensor:
        """Returns the mean log-density, [B], under a Gaussian fitted to all y, not the context."""
        low, high = self.process.scale
        variance = (low * low + low * high + high * high) / 3 + self.process.noise**2
        return Normal(0.0, math.sqrt(variance)).log_prob(task.y_target.double()).mean((1, 2))

    def _inputs(
        self, generator: torch.Generator, batch: int, n_points: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws x [B, n_points, 1], lengthscale and scale [B, 1, 1], float32."""

        def uniform(shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
            if low == high:
                return torch.full(shape, low, device=self.device)
            unit = torch.rand(shape, device=self.device, generator=generator)
            return low + (high - low) * unit

        x = uniform((batch, n_points, 1), *X_RANGE)
        each = (batch, 1, 1)
        lengthscale = uniform(each, *self.process.lengthscale)
        return x, lengthscale, uniform(each, *self.process.scale)

    def _noise(self, x: torch.Tensor) -> torch.Tensor:
        return self.process.noise**2 * torch.eye(x.shape[1], device=x.device, dtype=x.dtype)


def _covariance(
    a: torch.Tensor, b: torch.Tensor, lengthscale: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Maps [B, n, 1] and [B, m, 1] to covariances [B, n, m]."""
    return scale.square() * torch.exp(-0.5 * ((a - b.mT) / lengthscale).square())
