"""Shows a training loop of your own: varying sizes, another optimizer, a schedule of PyTorch.

python custom_loop.py [steps]
"""

import sys

import torch

from tnp.model.buckets import Buckets
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.tasks import GaussianProcessTasks, draw_sizes
from tnp.train.step import TrainingStep

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = device.type == "cuda"
torch.manual_seed(0)

config = TNPConfig(d_model=64, n_layers=3, n_heads=4, d_ff=128, n_components=3)
model = TransformerNP(config).to(device)  # in bfloat16 on a GPU, in float32 on a CPU
# A captured step needs an optimizer that can be captured. On a CPU any optimizer works.
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3, capturable=on_gpu)
# Batches are padded to the sizes of a bucket. On a GPU each bucket has its own graph.
step = TrainingStep(
    model, optimizer=optimizer, max_grad_norm=1.0, cuda_graph=on_gpu,
    buckets=Buckets(max_context=46, max_target=50) if on_gpu else None,
)  # fmt: skip
# A graph reads the learning rate from the device. Other numbers of an optimizer are fixed in it.
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=1e-3, total_steps=steps, cycle_momentum=False
)

tasks = GaussianProcessTasks(device)
for index in range(steps):
    n_context, n_target = draw_sizes(0, index, (3, 46), (20, 50))
    loss = step(tasks.sample(0, index, 16, n_context, n_target))
    schedule.step()
    if index % 100 == 0:
        print(f"step {index}: {loss.item():.3f} nats per target")

task = tasks.sample(seed=1, step=0, batch=64, n_context=20, n_target=50)
exact = tasks.exact_log_likelihood(task, seed=1, step=0).mean().item()
print(f"held out {-model.loss(task).item():.3f}, exact posterior {exact:.3f} nats per target")
