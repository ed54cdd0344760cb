"""Draws a map from some of its points: elevations in the Appalachians, beside interpolation.

python terrain.py [steps]

The elevations are those of the United States Geological Survey that matplotlib ships.
"""

import sys

import matplotlib.cbook
import numpy as np
import torch
from scipy.interpolate import griddata

from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.plots import plot_image
from tnp.tasks import FunctionTasks
from tnp.train.loop import HeldOut, cosine, fit
from tnp.train.step import TrainingStep

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 800
torch.manual_seed(0)

SIDE = 32  # cells of a window
elevation = matplotlib.cbook.get_sample_data("jacksboro_fault_dem.npz")["elevation"]  # metres


def windows(columns: range) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns functions from (row, column) in a window to metres above its mean."""
    cells = np.stack(np.meshgrid(*[np.linspace(-1, 1, SIDE)] * 2, indexing="ij"), -1)
    found = []
    for top in range(0, elevation.shape[0] - SIDE + 1, SIDE // 2):
        for left in columns:
            window = elevation[top : top + SIDE, left : left + SIDE].astype(float)
            found.append((cells.reshape(-1, 2), (window - window.mean()).reshape(-1, 1)))
    return found


# The east is never trained on.
west, east = windows(range(0, 300 - SIDE, SIDE // 2)), windows(range(300, 403 - SIDE, SIDE))
sizes = {"n_context": (20, 150), "n_target": (100, 100)}
tasks, unseen = FunctionTasks(west, batch=8, **sizes), FunctionTasks(east, batch=8, **sizes)

config = TNPConfig(d_x=2, d_model=64, n_layers=4, n_heads=4, d_ff=128, n_components=3)
model = TransformerNP(config, normalization=tasks.normalization)
step = TrainingStep(model, learning_rate=1e-3, max_grad_norm=1.0)
run = fit(
    step, tasks, steps, schedule=lambda i: cosine(i, 1e-3, 50, steps),
    evaluate=HeldOut(unseen(i) for i in range(4)), every=200, on_report=print,
)  # fmt: skip

# Every other cell of a window in the east, from 100 of its points.
whole = FunctionTasks(east[:1], batch=1, n_context=(100, 100), n_target=(900, 900))(0)
prediction = run.model.predict(whole.context, whole.x_target)
known, at = whole.x_context[0].numpy(), whole.x_target[0].numpy()
nearest = griddata(known, whole.y_context[0, :, 0].numpy(), at, method="nearest")
for name, found in (("this model", prediction.mean[0, :, 0].numpy()), ("nearest point", nearest)):
    error = found - whole.y_target[0, :, 0].numpy()
    print(f"{name}: off by {np.sqrt((error**2).mean()):.1f} m")
plot_image(whole.context, whole.x_target, prediction).save("terrain.html")
