"""Predicts temperatures at stations that were never trained on, from other stations of the day.

python stations.py [steps]

The table is drawn here, with missing values: 300 days of 40 stations. A function is a day: it maps
a place to its temperature. The use is a place without measurements, so training holds whole
stations out of each task's context. Ten stations and the last sixty days are never trained on.
"""

import csv
import sys

import numpy as np
import torch

from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.tasks import Context, FunctionTasks, functions_of_table
from tnp.train.loop import HeldOut, cosine, fit
from tnp.train.step import TrainingStep

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 800
torch.manual_seed(0)
chance = np.random.default_rng(0)


def measured(n_days: int = 300, n_stations: int = 40) -> dict[str, np.ndarray]:
    """Returns columns of a table, a row for each day and station. 5 % of temperatures are NaN."""
    place = chance.uniform(0, 400, (n_stations, 2))  # km to the east and to the north
    height = chance.gamma(2.0, 250.0, n_stations)  # m
    kind = chance.choice(["rural", "urban"], n_stations)
    # Weather: waves of about 800 km, which are drawn anew for each day.
    waves = chance.normal(0, 2 * np.pi / 800, (n_days, 6, 2))
    phase = chance.uniform(0, 2 * np.pi, (n_days, 6, 1))
    weather = 1.7 * np.cos(waves @ place.T + phase).sum(1)
    season = 283 - 9 * np.cos(2 * np.pi * np.arange(n_days) / 365)[:, None]
    kelvin = season + weather - 0.0065 * height + 1.5 * (kind == "urban")
    kelvin += chance.normal(0, 0.5, kelvin.shape)
    kelvin[chance.random(kelvin.shape) < 0.05] = np.nan
    days = np.datetime64("2025-01-01") + np.arange(n_days)
    names = np.array([f"S{i:02}" for i in range(n_stations)])
    each = {"station": names, "east": place[:, 0], "north": place[:, 1], "height": height}
    table = {name: np.tile(values, n_days) for name, values in (each | {"kind": kind}).items()}
    return table | {"day": np.repeat(days, n_stations), "kelvin": kelvin.ravel()}


def rows(table: dict[str, np.ndarray], which: np.ndarray) -> dict[str, np.ndarray]:
    return {name: values[which] for name, values in table.items()}


table = measured()
table = rows(table, ~np.isnan(table["kelvin"]))  # in pandas: table.dropna(subset=["kelvin"])
table["urban"] = table["kind"] == "urban"  # a category is a column of 0 and 1 for each value
unseen = [f"S{i:02}" for i in range(10)]
is_late = table["day"] >= np.datetime64("2025-01-01") + 240
is_unseen = np.isin(table["station"], unseen)

columns = {
    "x": ["east", "north", "height", "urban"], "y": ["kelvin"], "by": "day", "group": "station",
}  # fmt: skip
known = functions_of_table(rows(table, ~is_late & ~is_unseen), **columns)
late = functions_of_table(rows(table, is_late), **columns)
sizes = {"batch": 16, "n_context": (5, 30), "n_target": (4, 10)}
tasks = FunctionTasks(known, **sizes, hold_out=0.3)  # three in ten stations of each day
checks = FunctionTasks(late, **sizes, hold_out=unseen)

config = TNPConfig(d_x=4, d_model=64, n_layers=3, n_heads=4, d_ff=128, n_components=3)
model = TransformerNP(config, normalization=tasks.normalization)
step = TrainingStep(model, learning_rate=1e-3, max_grad_norm=1.0)
run = fit(
    step, tasks, steps, schedule=lambda i: cosine(i, 1e-3, 50, steps), average=0.99,
    evaluate=HeldOut(checks(i) for i in range(4)), every=200, on_report=print,
)  # fmt: skip

# Every late day at the unseen stations, from all others; `late` is in the order of the days.
found = []
for day, (x, y, stations) in zip(np.unique(table["day"][is_late]), late, strict=True):
    is_target = torch.tensor([station in unseen for station in stations])
    context = Context(x[None, ~is_target], y[None, ~is_target])
    prediction = run.model.predict(context, x[None, is_target])
    ends = prediction.quantile(0.05), prediction.mean, prediction.quantile(0.95)
    numbers = torch.stack([y[is_target, 0], *(values[0, :, 0] for values in ends)], 1)
    mean = context.y.mean().item()
    names = [station for station in stations if station in unseen]
    found += [(day, name, *row, mean) for name, row in zip(names, numbers.tolist(), strict=True)]

header = ["day", "station", "kelvin", "low", "mean", "high", "mean_of_others"]
with open("station_predictions.csv", "w", newline="") as file:
    csv.writer(file).writerows([header, *found])
truth, low, mean, high, others = np.array([row[2:] for row in found]).T
print(f"{len(found)} temperatures at unseen stations are in station_predictions.csv")
for name, guess in (("this model", mean), ("mean of the other stations", others)):
    print(f"{name}: off by {np.sqrt(((guess - truth) ** 2).mean()):.2f} K")
print(f"{((low <= truth) & (truth <= high)).mean():.1%} of them lie in the 90 % interval")
