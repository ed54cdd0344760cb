"""Draws any number of pictures: discs that lie on one another like dead leaves.

Radii follow a power law, r⁻³, like the sizes of things in photographs, so that edges and flat areas
occur at every scale (Lee, Mumford and Huang, Occlusion models for natural images, International
Journal of Computer Vision 41, 2001).
"""

import torch

N_LEAVES = 400  # the upper ones; the rest of the picture is one more leaf
SMALLEST = 0.02  # radius, as a share of the picture's side
LARGEST = 0.6


def dead_leaves(generator: torch.Generator, batch: int, side: int) -> torch.Tensor:
    """Draws grey levels [batch, side, side], float32, standard normal from leaf to leaf.

    Each leaf also has its own slope, as if light fell on it from one side.
    """
    device = generator.device

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(batch, *shape, device=device, generator=generator)

    # The inverse of the distribution with density ~ r⁻³ between both ends.
    ends = SMALLEST**-2, LARGEST**-2
    radius = (ends[0] + (ends[1] - ends[0]) * uniform(N_LEAVES)).rsqrt()
    centre = uniform(N_LEAVES, 2) * (1 + 2 * SMALLEST) - SMALLEST
    grid = (torch.arange(side, device=device) + 0.5) / side
    offset = [grid - centre[..., i : i + 1] for i in (0, 1)]
    square = offset[0].square().unsqueeze(-1) + offset[1].square().unsqueeze(-2)
    covers = square < radius.square()[..., None, None]
    # argmax of booleans gives the first True, the topmost leaf, or 0 if there is none.
    top = torch.where(covers.any(1), covers.to(torch.uint8).argmax(1), N_LEAVES)
    level = torch.randn(batch, N_LEAVES + 1, device=device, generator=generator)
    slope = torch.randn(2, batch, N_LEAVES + 1, device=device, generator=generator)

    def of_leaf(values: torch.Tensor) -> torch.Tensor:
        return values.gather(1, top.flatten(1)).view_as(top)

    ramp = of_leaf(slope[0]) * (grid - 0.5)[:, None] + of_leaf(slope[1]) * (grid - 0.5)
    return of_leaf(level) + ramp
