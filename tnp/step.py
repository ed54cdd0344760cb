"""One training step: forward, backward, optimizer; eager, compiled, or as one CUDA graph."""

import math

import torch
from torch import nn

from tnp.model import TransformerNP
from tnp.ops.casting import WeightCasts
from tnp.tasks import Task
from tnp.variants import COMPILE_MODES

# Steps a captured step runs eagerly first: cuBLAS, Triton and AdamW create their state in them.
N_EAGER_BEFORE_CAPTURE = 3


def shorten_inductor_messages() -> None:
    """Let Inductor name operators alone in its messages, before torch 2.13, which does not need it.

    For a log line Inductor writes out the arguments of each custom operator that it meets first,
    nested as deeply as the graph, whether or not anybody logs: compiling `fused` takes 45 s with 3
    blocks and had not ended after 200 s with 12; without the arguments 24 s (torch 2.11, CPU).
    """
    if torch.__version__ < "2.13":
        from torch._inductor.exc import OperatorIssue  # slow to import, and not all compile

        OperatorIssue.operator_str = staticmethod(_operator_name)


def _operator_name(target: object, args: object, kwargs: object) -> str:
    return f"  target: {target}"


class _Captured:
    """What a captured step reads and writes, and where it lay: a graph knows addresses alone."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, casts: WeightCasts
    ) -> None:
        self.copies = casts.copies()  # kept, whatever later steps do without
        self.parameters = [
            (f"{prefix}.{name}".lstrip("."), module._parameters, name, parameter.data_ptr())
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        self.optimizer, self.state = optimizer, optimizer.state

    def check(self) -> None:
        """Raises RuntimeError where a replay would train what nobody reads any more."""
        again = "since the step was captured: make a new TrainingStep"
        for path, owner, name, address in self.parameters:
            if owner[name].data_ptr() != address:
                raise RuntimeError(f"parameter {path} was moved or replaced {again}")
        if self.optimizer.state is not self.state:
            raise RuntimeError(f"the optimizer's state was replaced {again}")


def _check_rate(learning_rate: float) -> None:
    if not 0 <= learning_rate < math.inf:
        raise ValueError(f"learning_rate is {learning_rate}: it must be finite and not negative")


class TrainingStep:
    """Callable that trains `model` on one task and returns its loss, with no host synchronization.

    Args:
        model: parameters on the device the step runs on; compiled where its variant says so.
        learning_rate: AdamW's; `set_learning_rate` changes it, also between replays of a graph.
        weight_decay: AdamW's decoupled weight decay.
        optimizer: False leaves the parameters alone: forward and backward only.
        cuda_graph: capture the whole step and replay it. The first `N_EAGER_BEFORE_CAPTURE` calls
            are ordinary steps on a side stream; all calls must have the shapes of the first, and
            neither parameters nor the optimizer's state may be moved or replaced after it.
    """

    def __init__(
        self,
        model: TransformerNP,
        *,
        learning_rate: float,
        weight_decay: float = 0.01,
        optimizer: bool = True,
        cuda_graph: bool = False,
    ) -> None:
        self.model = model
        device = next(model.parameters()).device
        if cuda_graph and device.type != "cuda":
            raise RuntimeError(f"a CUDA graph needs a CUDA device: the model is on {device}")
        _check_rate(learning_rate)
        on_cuda = device.type == "cuda"
        # A learning rate that lives on the device can change between replays and never syncs.
        rate = torch.tensor(learning_rate, device=device) if on_cuda else learning_rate
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=rate,
            weight_decay=weight_decay,
            fused=True,
            capturable=on_cuda,
        )
        self.update = optimizer
        self.cuda_graph = cuda_graph
        self.nll = model.nll
        if model.variant.compile:
            shorten_inductor_messages()
            mode = COMPILE_MODES[model.variant.compile]
            self.nll = torch.compile(model.nll, fullgraph=True, mode=mode)
        self.casts = WeightCasts(model.parameters())
        self._n_calls = 0
        self._device = device
        self._stream = torch.cuda.Stream(device) if cuda_graph else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: _Captured | None = None
        self._static_task: Task | None = None
        self._static_loss: torch.Tensor | None = None

    def set_learning_rate(self, learning_rate: float) -> None:
        """Of the steps that follow; ValueError where it is negative or not finite."""
        _check_rate(learning_rate)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def __call__(self, task: Task) -> torch.Tensor:
        """The loss before the update, a float32 scalar on the device."""
        if not self.cuda_graph:
            return self._run(task)
        with torch.cuda.device(self._device):  # streams and captures are the current device's
            return self._call_captured(task)

    def _call_captured(self, task: Task) -> torch.Tensor:
        if self._static_task is None:
            self._static_task = task.clone()
        # Eager calls read the static inputs too: torch.compile guards on strides, and a task that
        # is a view of another layout would make it compile again in the middle of the capture.
        self._static_task.copy_(task)
        self._n_calls += 1
        if self._n_calls <= N_EAGER_BEFORE_CAPTURE:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                loss = self._run(self._static_task)
            torch.cuda.current_stream().wait_stream(self._stream)
            return loss
        if self._graph is None:
            self._capture()
        self._captured.check()
        self._graph.replay()
        return self._static_loss.clone()

    def _run(self, task: Task) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        # On this thread, not on autograd's own, where calls of Python cost the host more: a step at
        # small without a graph took 19.4 ms in place of 24.8 (one H200, torch 2.11, f477ec3).
        with self.casts.step(), torch.autograd.set_multithreading_enabled(False):
            loss = self.nll(task.x_context, task.y_context, task.x_target, task.y_target)
            loss.backward()
        if self.update:
            self.optimizer.step()
        return loss.detach()

    def _capture(self) -> None:
        # Gradients must be allocated inside the graph's own memory pool.
        self.optimizer.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._static_loss = self._run(self._static_task)
        self._captured = _Captured(self.model, self.optimizer, self.casts)
