"""Draws tasks of image completion: some pixels of a picture are the context, others the targets.

x is a pixel's (row, column) in [−1, 1], and y its brightness, standardized by mean and deviation of
the training pictures. The pictures depend on the number of pixels of a task:

    up to     625   scikit-image's lfw_subset, faces of 25 × 25 (the last 20 of 200 held out)
    up to  16,384   128 × 128 crops of its bundled photographs, flipped, contrast-inverted and up to
                    four times reduced; half of the pictures are drawn instead, of `dead_leaves`
    up to 262,144   their 512 × 512 crops, likewise

astronaut and camera are never trained on. There are any number of drawn pictures, so a model cannot
memorize them. 8-bit brightness gets uniform noise of ±½/255: without it, and without a floor under
sigma, a mixture would collapse onto the 256 values.
"""

import numpy as np
import torch
from torch.distributions import Normal

from tnp.tasks.dead_leaves import dead_leaves
from tnp.tasks.sources import IMAGE_SIDES, MAX_POINTS
from tnp.tasks.task import Task, check_sizes, random_generator
from tnp.util.checks import require_count
from tnp.util.extras import require

TRAINING = (
    "retina", "hubble_deep_field", "cell", "rocket", "coffee", "brick", "grass", "gravel", "page",
    "moon", "chelsea", "immunohistochemistry", "coins", "clock", "text", "logo",
)  # fmt: skip
LARGEST_REDUCTION = 4
SHARE_DRAWN = 0.5
HELD_OUT = ("astronaut", "camera")
N_HELD_OUT_FACES = 20
LEVELS = 255.0


class ImageTasks:
    """Draws tasks with d_x = 2, d_y = 1 on `device`.

    Args:
        n_points: context and target points of a task, which decide the pictures; see the module.
        held_out: whether to draw from the pictures that are never trained on.
    """

    d_x = 2

    def __init__(
        self, n_points: int, device: torch.device | str = "cpu", held_out: bool = False
    ) -> None:
        n_points = require_count("n_points", n_points, at_least=1)
        self.side = next((side for side in IMAGE_SIDES if side * side >= n_points), None)
        if self.side is None:
            raise ValueError(
                f"n_points is {n_points}: an image task has at most {MAX_POINTS['images']}"
            )
        self.device = torch.device(device)
        training, held_out_pictures = _pictures(self.side)
        pixels = np.concatenate([picture.ravel() for picture in training])
        self._mean, self._deviation = float(pixels.mean()), float(pixels.std())
        pictures = held_out_pictures if held_out else training
        self._pictures = [torch.from_numpy(picture).to(self.device) for picture in pictures]
        self._augment = not held_out and self.side > IMAGE_SIDES[0]

    @property
    def sigma_min(self) -> float:
        """Returns one grey level in standardized units: the smallest sigma that a model needs."""
        return 1.0 / (LEVELS * self._deviation)

    def sample(self, seed: int, step: int, batch: int, n_context: int, n_target: int) -> Task:
        """Draws the task of (seed, step). Every point is another pixel.

        Raises ValueError for more points than pixels, and like `GaussianProcessTasks.sample`.
        """
        sizes = check_sizes(seed, step, batch, n_context, n_target)
        seed, step, batch, n_context, n_target = sizes
        n_points = n_context + n_target
        if n_points > self.side**2:
            raise ValueError(
                f"{n_context} context and {n_target} target points are more than the "
                f"{self.side**2} pixels of a picture"
            )
        rng = np.random.default_rng((seed, step))
        generator = random_generator(self.device, seed, step)
        crops = torch.stack([self._crop(rng) for _ in range(batch)])
        if self._augment:
            drawn = self._mean + self._deviation * dead_leaves(generator, batch, self.side)
            is_drawn = torch.from_numpy(rng.random(batch) < SHARE_DRAWN).to(self.device)
            crops = torch.where(is_drawn[:, None, None], drawn.clamp(0.0, 1.0), crops)
        crops = crops.flatten(1)
        order = torch.rand(crops.shape, device=self.device, generator=generator).argsort(1)
        chosen = order[:, :n_points]
        noise = torch.rand(chosen.shape, device=self.device, generator=generator) - 0.5
        y = (crops.gather(1, chosen) + noise / LEVELS - self._mean) / self._deviation
        rows, columns = chosen // self.side, chosen % self.side
        x = torch.stack([rows, columns], dim=-1) * (2.0 / (self.side - 1)) - 1.0
        y = y.unsqueeze(-1)
        return Task(x[:, :n_context], y[:, :n_context], x[:, n_context:], y[:, n_context:])

    def prior_log_likelihood(self, task: Task) -> torch.Tensor:
        """Returns tasks' mean log-densities, [B], under a Gaussian fitted to training pictures."""
        return Normal(0.0, 1.0).log_prob(task.y_target.double()).mean((1, 2))

    def _crop(self, rng: np.random.Generator) -> torch.Tensor:
        picture = self._pictures[rng.integers(len(self._pictures))]
        most = min(LARGEST_REDUCTION, min(picture.shape) // self.side) if self._augment else 1
        reduction = int(rng.integers(1, most, endpoint=True))
        extent = self.side * reduction
        top, left = (rng.integers(size - extent + 1) for size in picture.shape)
        crop = picture[top : top + extent, left : left + extent]
        if reduction > 1:
            crop = crop.unflatten(1, (-1, reduction)).unflatten(0, (-1, reduction)).mean((1, 3))
        if self._augment:
            flips = [dim for dim in (0, 1) if rng.integers(2)]
            crop = crop.flip(flips)
            if rng.integers(2):
                # Mirrored about the training mean, so that the mean does not change.
                crop = 2.0 * self._mean - crop
        return crop


def _pictures(side: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns training and held-out pictures of at least `side` pixels, float32 in [0, 1]."""
    # Imported here, so that only training on images needs scikit-image.
    color, data = (require(f"skimage.{x}", "image tasks", "images") for x in ("color", "data"))

    def brightness(picture: np.ndarray) -> np.ndarray:
        return color.rgb2gray(picture[..., :3]) if picture.ndim == 3 else picture / LEVELS

    if side == IMAGE_SIDES[0]:
        faces = data.lfw_subset().astype(np.float32)
        return list(faces[:-N_HELD_OUT_FACES]), list(faces[-N_HELD_OUT_FACES:])
    training, held_out = (
        [brightness(getattr(data, name)()).astype(np.float32) for name in names]
        for names in (TRAINING, HELD_OUT)
    )
    return [picture for picture in training if min(picture.shape) >= side], held_out
