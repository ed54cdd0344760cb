"""Completes faces from some of their pixels, by a model that is saved and loaded again.

python image_completion.py [steps]
"""

import sys

import torch

from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.plots import plot_image
from tnp.tasks import ImageTasks, draw_sizes
from tnp.train.loop import HeldOut, cosine, fit
from tnp.train.step import TrainingStep

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 800
torch.manual_seed(0)

N_PIXELS = 625
faces, unseen = ImageTasks(N_PIXELS), ImageTasks(N_PIXELS, held_out=True)


def task(index: int):
    """Returns a batch. Each batch has another number of known pixels."""
    (n_known,) = draw_sizes(0, index, (20, 200))
    return faces.sample(seed=0, step=index, batch=8, n_context=n_known, n_target=100)


config = TNPConfig(
    d_x=2, d_model=64, n_layers=4, n_heads=4, d_ff=128, n_components=3, sigma_min=faces.sigma_min
)
model = TransformerNP(config)
step = TrainingStep(model, learning_rate=1e-3, max_grad_norm=1.0)
held_out = HeldOut([unseen.sample(1, i, 8, 100, 100) for i in range(4)])
run = fit(
    step, task, steps, schedule=lambda i: cosine(i, 1e-3, 50, steps), evaluate=held_out, every=200,
    on_report=print,
)  # fmt: skip

run.model.save("face_model")
model = TransformerNP.load("face_model", variant="auto")
face = unseen.sample(seed=2, step=0, batch=1, n_context=100, n_target=N_PIXELS - 100)
pixels = torch.cat([face.x_context, face.x_target], 1)
plot_image(face.context, pixels, model.predict(face.context, pixels)).save("face.html")
