"""Holds the sizes of a Transformer Neural Process."""

import math
from dataclasses import dataclass

from tnp.util.checks import require_count, require_real


@dataclass(frozen=True)
class TNPConfig:
    """Holds the sizes of the model. The defaults are the specification's.

    `sigma_min` is in units of y, or of y's deviation if the model has a normalization.

    `heads_gain` scales the first weights of the heads' last layer. At 0.1 all components start near
    N(0, 1). At 1, the scale of other layers, some start with deviations of 0.08. Gradients then
    become many times larger than Adam has seen, and the loss jumps (docs/decisions).

    `buffer` is how many points training adds to a context, in a buffer that later targets see
    (`tnp.model.causal_buffer`). A joint sample adds as many before it encodes the context anew.
    None: the model has no buffer.
    """

    d_x: int = 1
    d_y: int = 1
    d_model: int = 512
    n_layers: int = 12
    n_heads: int = 8
    d_ff: int = 1365
    n_components: int = 10
    sigma_min: float = 0.0
    heads_gain: float = 0.1
    buffer: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (name, value) != ("buffer", None):
                is_size = name not in ("sigma_min", "heads_gain")
                number = require_count(name, value, 1) if is_size else require_real(name, value)
                object.__setattr__(self, name, number)
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model {self.d_model} is not a multiple of n_heads {self.n_heads}: "
                "each head takes an equal share"
            )
        if not 0 <= self.sigma_min < math.inf:
            raise ValueError(f"sigma_min is {self.sigma_min}: it must be finite and not negative")
        if not 0 < self.heads_gain < math.inf:
            raise ValueError(f"heads_gain is {self.heads_gain}: it must be positive and finite")
