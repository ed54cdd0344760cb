"""Draws targets one after another, each given the earlier ones, without waiting for the host.

Points, values and noise have fixed places, and the index of the next place is on the device. So one
CUDA graph draws targets of all runs, from the third on that is drawn after another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tnp.cuda_graphs import Captures
from tnp.model.causal_buffer import Buffer
from tnp.model.prediction import Encoding, draw
from tnp.ops._shared.casting import WeightCasts
from tnp.ops._shared.ready_weights import weights_ready

if TYPE_CHECKING:
    from tnp.model.network import Network


class Draws:
    """Draws a joint sample [B, N, d_y], one target after another.

    Args:
        model: a model with a buffer.
        x_target: [B, N, d_x] in the user's units, in the order of the draws.
        captures: captures the draw of a target after another; None: every draw is launched.
    """

    def __init__(
        self, model: Network, x_target: torch.Tensor, captures: Captures | None = None
    ) -> None:
        self._model, self._captures = model, captures
        self._x = model.prepared_x(x_target)
        config, (batch, n_target, _) = model.config, x_target.shape
        in_64_bits = model.normalization is not None or model.compute_dtype == torch.float64
        on = {"dtype": torch.float64 if in_64_bits else torch.float32, "device": x_target.device}
        self._y = torch.zeros(batch, n_target, config.d_y, **on)
        # All noise is drawn at once. In the steps it would take a launch or two for each number.
        gumbel = -torch.empty(batch, n_target, config.n_components, **on).exponential_().log()
        self._noise = torch.cat([gumbel, torch.randn(self._y.shape, **on)], -1)
        # The places of the last drawn target and of the next one.
        self._places = torch.arange(-1, 1, device=x_target.device)
        self._drawn = 0  # the same number on the host
        self._known: Buffer | None = None
        self._casts = WeightCasts(model.parameters())
        self._steps, self._replay = 0, None

    def run(self, encoding: Encoding, n: int) -> torch.Tensor:
        """Returns the next n targets' values [B, n, d_y]. The first sees only the context.

        Args:
            encoding: the encoded context, of B samples or of a divisor of B.
            n: how many targets; all but the last enter the buffer.
        """
        if self._known is None:
            batch, n_target, _ = self._x.shape
            self._known = Buffer(self._model, encoding, n_target - 1, batch // encoding.batch)
        else:
            self._known.refill(encoding)
        self._draw(self._known.alone(self._x.index_select(1, self._places[1:])))
        for _ in range(n - 1):
            self._follow()
        first, self._drawn = self._drawn, self._drawn + n
        return self._y[:, first : self._drawn]

    def _follow(self) -> None:
        """Draws a target after another: twice launched, then captured, then replayed.

        The first step casts each weight at its first use. The second and the captured step cast all
        weights before, so products may read these copies ahead. The second is launched because it
        loads the kernels that do so. No kernel can be loaded during a capture.
        """
        self._steps += 1
        if self._steps == 1:
            with self._casts.step():
                self._enter_and_draw()
        elif self._captures is None or self._steps == 2:
            with self._casts.step(), weights_ready(self._weights()):
                self._enter_and_draw()
        else:
            if self._replay is None:
                with self._casts.step(), weights_ready(self._weights()):
                    self._replay, _ = self._captures.capture(self._enter_and_draw)
            self._replay()

    def _weights(self) -> list[torch.Tensor]:
        """Returns the casts that a step begins with, and all parameters."""
        return [*self._casts.copies(), *self._model.parameters()]

    def _enter_and_draw(self) -> None:
        # These launches stand between the casts of weights and the first product.
        x, x_next = self._x.index_select(1, self._places).split(1, 1)
        y = self._model.in_units("y", self._y.index_select(1, self._places[:1]))
        self._draw(self._known.behind(x_next, x, y))

    def _draw(self, parameters: torch.Tensor) -> None:
        model, place = self._model, self._places[1:]
        noise = self._noise.index_select(1, place).split(
            [parameters.shape[-2], self._y.shape[-1]], -1
        )
        y = draw(parameters, *noise, model.config.sigma_min, model.normalization)
        self._y.index_copy_(1, place, y.to(self._y.dtype))
        self._places += 1
