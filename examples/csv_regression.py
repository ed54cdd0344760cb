"""Goes from a table to a plotted prediction: the sea's temperature over a year, from some months.

python csv_regression.py [steps]
"""

import sys
from pathlib import Path

import numpy as np
import torch

from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.plots import plot_curve
from tnp.tasks import Context, FunctionTasks, functions_of_table
from tnp.train.loop import cosine, fit
from tnp.train.step import TrainingStep

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
torch.manual_seed(0)

file = Path(__file__).with_name("sea_temperatures.csv")
table = np.genfromtxt(file, delimiter=",", names=True)
years = functions_of_table(table, x=["month"], y=["temperature"], by="year")
known, (x, y) = years[:-1], years[-1]  # the last year is never trained on
tasks = FunctionTasks(known, batch=16, n_context=(1, 8), n_target=(4, 11))

config = TNPConfig(d_model=64, n_layers=3, n_heads=4, d_ff=128, n_components=3)
model = TransformerNP(config, normalization=tasks.normalization)
step = TrainingStep(model, learning_rate=1e-3, max_grad_norm=1.0)
run = fit(
    step, tasks, steps, schedule=lambda i: cosine(i, 1e-3, 100, steps), average=0.995,
    every=500, on_report=print,
)  # fmt: skip

context = Context(x[None, ::4], y[None, ::4])  # January, May and September
months = torch.linspace(1, 12, 56)[None, :, None]
prediction = run.model.predict(context, months)
samples = run.model.sample_jointly(context, months[:, ::5], n_samples=3)
print("predicted", prediction.mean[0, ::11, 0].tolist(), "measured", y[::2, 0].tolist())
plot_curve(context, months, prediction).save("sea_temperature.html")
at = months[:, ::5]
plot_curve(context, at, run.model.predict(context, at), samples).save("sea_samples.html")
