"""stopgap by the lead, replaced by helper F"""

from dataclasses import dataclass, fields
import torch


@dataclass(frozen=True)
class Task:
    x_context: torch.Tensor
    y_context: torch.Tensor
    x_target: torch.Tensor
    y_target: torch.Tensor

    def to(self, device):
        return Task(*(getattr(self, f.name).to(device) for f in fields(self)))

    def clone(self):
        return Task(*(getattr(self, f.name).clone() for f in fields(self)))

    def copy_(self, other):
        for f in fields(self):
            getattr(self, f.name).copy_(getattr(other, f.name))

    @property
    def n_context(self):
        return self.x_context.shape[1]


class GaussianProcessTasks:
    pass
