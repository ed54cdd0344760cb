"""Makes one training step: forward, backward and optimizer; eager, compiled, or as CUDA graphs."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import SupportsFloat

import torch
import torch.nn.functional as F

from tnp.cuda_graphs import Captures
from tnp.dispatch.private import allow_graphs, shorten_inductor_messages
from tnp.dispatch.spec import OWN
from tnp.model.buckets import Buckets
from tnp.model.causal_buffer import n_entering
from tnp.model.checkpoint import require_no_weight_in_padding
from tnp.model.layers import HiddenLayer
from tnp.model.packing import Capacity, capacity_for
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import COMPILE_MODES
from tnp.ops._shared.casting import WeightCasts
from tnp.ops._shared.ranges import asserts
from tnp.tasks.sizes import Sizes
from tnp.tasks.task import Task, require_tasks
from tnp.train import warm
from tnp.train.step_graphs import MOST_GRAPHS, StepGraphs, Watched
from tnp.util.checks import require_real

log = logging.getLogger("tnp.train.step")


def _not_negative(name: str, value: SupportsFloat) -> float:
    number = require_real(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} is {value!r}: it must be finite and not negative")
    return number


class TrainingStep:
    """Trains `model` on tasks when called, and returns the loss, without waiting for the device.

    If the variant packs, lengths that were never on the CPU are counted on the device, and the host
    waits for it. So make tasks on the CPU.

    Args:
        model: the model. The step runs on the device of its parameters, and is compiled if the
            variant says so.
        learning_rate: AdamW's learning rate. `set_learning_rate` changes it, also between replays.
        weight_decay: AdamW's decoupled weight decay.
        optimizer: an optimizer of the model's parameters, in place of AdamW. If it does not update
            each weight by itself (Adafactor, Muon), the variant must pad no hidden layers. A
            schedule of `torch.optim.lr_scheduler` may change learning rates, also between replays.
            A captured step keeps its other settings.
        update: False runs only forward and backward, and changes no parameters.
        max_grad_norm: the largest norm of all gradients together; larger ones are scaled down to
            it.
        cuda_graph: whether to capture the whole step and replay it. The first calls are ordinary
            steps on a side stream. After them, parameters and the optimizer's state may not be
            moved or replaced. `grad` of a parameter is meaningless after a replay. Without
            `buckets` all calls must have the sizes of the first.
        buckets: sizes that tasks are padded to, if they vary in size. Each size has its own graph.
            A task larger than all buckets runs unpadded, without a graph. Nothing is padded if no
            operator is ours and the step is compiled but not captured.
    """

    def __init__(
        self,
        model: TransformerNP,
        *,
        learning_rate: float | None = None,
        weight_decay: float = 0.01,
        optimizer: torch.optim.Optimizer | None = None,
        update: bool = True,
        max_grad_norm: float | None = None,
        cuda_graph: bool = False,
        buckets: Buckets | None = None,
    ) -> None:
        _check_model(model)
        model.require_device(trains=True)
        self.model, self.update, self.buckets = model, update, buckets
        device = next(model.parameters()).device
        if cuda_graph and device.type != "cuda":
            raise RuntimeError(f"a CUDA graph needs a CUDA device: the model is on {device}")
        if buckets is not None and not isinstance(buckets, Buckets):
            raise TypeError(f"buckets is a {type(buckets).__name__}: it must be a Buckets")
        if max_grad_norm is not None:
            max_grad_norm = require_real("max_grad_norm", max_grad_norm)
            if not 0 < max_grad_norm < math.inf:
                raise ValueError(
                    f"max_grad_norm is {max_grad_norm}: it must be positive and finite"
                )
        self.max_grad_norm = max_grad_norm
        if (learning_rate is None) == (optimizer is None):
            raise ValueError("give either a learning_rate, which is AdamW's, or an optimizer")
        if optimizer is not None:
            _check_optimizer(optimizer, model)
        self.optimizer = optimizer or _adamw(model, learning_rate, weight_decay, device)
        self._device = device
        self.nll = model.nll
        dynamic = None
        if model.variant.compile:
            dynamic = _is_dynamic(model) if buckets is not None else None
            self.nll = _compiled(model, dynamic)
        # A step that PyTorch compiled for all sizes gains nothing by padding, unless it is
        # captured.
        serves_all = dynamic and model.variant.role() != OWN and not cuda_graph
        self._pads = buckets is not None and not serves_all
        self.casts = WeightCasts(model.parameters())
        self._graphs = None
        if cuda_graph:
            _check_capturable(self.optimizer)
            captures = Captures(device)
            self._graphs = StepGraphs(self._run, self._watch, captures, vary=buckets is not None)
        self._has_met_larger = False
        self._is_warm = not warm.launches_our_kernels(model)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Changes the learning rate of later steps.

        Raises:
            ValueError: the rate is not a number, negative, or not finite.
        """
        learning_rate = _not_negative("learning_rate", learning_rate)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def __call__(self, *tasks: Task) -> torch.Tensor:
        """Returns the mean loss of all targets before the update, a float32 scalar on the device.

        Gradients of several tasks are added up before one update, for batches that do not fit in
        memory. NaN or infinity in a task on the CPU is a ValueError. On a GPU the check would wait
        for the device, so the loss is NaN instead.
        """
        if not tasks:
            raise ValueError("there is no task to train on: give at least one")
        require_tasks("tasks to train on", tasks)
        if self._device.type == "cpu":
            for task in tasks:
                task.check_finite(self.model.units)
        sizes = self._sizes(tasks)
        if sizes is None:
            self._say_once(tasks)
            return self._run(tasks)
        tasks, capacity = self._sized(tasks, sizes)
        if self._graphs is None:
            return self._run(tasks, capacity)
        return self._graphs(tasks, capacity)

    def n_rows(self, task: Task) -> int:
        """Returns how many rows a step computes outside attention, padding included."""
        sizes, capacity = self._sizes((task,)), None
        if sizes is not None:
            (task,), capacity = self._sized((task,), sizes)
        known = task.n_context + n_entering(self.model.config.buffer, task.n_target)
        return sum(capacity or (task.batch * known, task.batch * task.n_target))

    def _sizes(self, tasks: tuple[Task, ...]) -> Sizes | None:
        """Returns the size that all tasks are padded to, or None if no bucket is large enough."""
        largest = _largest(tasks)
        return self.buckets.sizes(*largest) if self._pads else largest

    def _sized(
        self, tasks: tuple[Task, ...], sizes: Sizes
    ) -> tuple[tuple[Task, ...], Capacity | None]:
        """Returns the tasks, padded if necessary, and the packed rows of each."""
        pack = self.model.variant.pack
        if pack or self._pads:
            tasks = tuple(task.padded(*sizes) for task in tasks)
        if not pack:
            return tasks, None
        each = [capacity_for(task.count(), task.batch, sizes) for task in tasks]
        return tasks, tuple(map(max, zip(*each, strict=True)))

    def _run(self, tasks: tuple[Task, ...], capacity: Capacity | None = None) -> torch.Tensor:
        if not self._is_warm:
            self._is_warm = True
            warm.before_step(self.model, tasks, capacity)
        if self._graphs is not None:
            _put_rates_on(self._device, self.optimizer)
        # Gradients of a captured step must be allocated in the graph's own memory.
        self.optimizer.zero_grad(set_to_none=True)
        shares, total = _shares(tasks), None
        # On this thread, because calls of Python cost the host more on autograd's own thread:
        # without a graph, a step at `small` took 19.4 ms in place of 24.8 (one H200, torch 2.11,
        # f477ec3).
        with self.casts.step(), torch.autograd.set_multithreading_enabled(False):
            for task, share in zip(tasks, shares, strict=True):
                loss = self.nll(*task, capacity)
                loss = loss if share is None else share * loss
                loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        if self.update:
            self.optimizer.step()
        return total

    def _watch(self) -> Watched:
        return Watched(self.model, self.optimizer, self.casts)

    def load_optimizer(self, state: dict) -> None:
        """Loads an optimizer's state from `self.optimizer.state_dict()`, of this or another step.

        The optimizer still runs as it does here, for example captured. Raises ValueError if the
        state has other groups of parameters.
        """
        groups = self.optimizer.param_groups, state["param_groups"]
        here, there = ([len(group["params"]) for group in of] for of in groups)
        if here != there:
            raise ValueError(
                f"the optimizer has groups of {here} parameters here and {there} in its state: "
                "make it with the same groups"
            )
        how = [
            {name: group[name] for name in ("capturable", "fused", "foreach") if name in group}
            for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(state)
        for group, own in zip(self.optimizer.param_groups, how, strict=True):
            group.update(own)

    def _say_once(self, tasks: tuple[Task, ...]) -> None:
        if not self._has_met_larger:
            log.warning(
                "a task of %d context and %d target points is larger than any bucket (%d and %d): "
                "such tasks run without padding and without a graph",
                *(*_largest(tasks), self.buckets.max_context, self.buckets.max_target),
            )
        self._has_met_larger = True


def _is_dynamic(model: TransformerNP) -> bool:
    """Returns whether PyTorch's operators are compiled once for all sizes.

    Our operators are compiled for each size even then. If blocks are recomputed, all operators are,
    because torch 2.13 then loses a symbolic size.
    """
    return not (model.checkpoint or model.variant.recompute_above)


def _compiled(model: TransformerNP, dynamic: bool | None) -> Callable[..., torch.Tensor]:
    """Returns the compiled loss. `dynamic` is None if all tasks have one size."""
    shorten_inductor_messages()
    mode = COMPILE_MODES[model.variant.compile]
    # Gates compare the layouts of our operators with their fakes. Compiled code would compare them
    # again at every call, which takes host time. TNP_CHECK=1 turns that on.
    options = {"size_asserts": asserts()}
    if mode:
        from tnp.dispatch.private import list_mode_options  # Inductor is slow to import

        options |= list_mode_options(mode)
    if dynamic is not None:
        allow_graphs(MOST_GRAPHS)
    if dynamic:
        # By its own notes, this analysis does not support symbolic sizes. It ends in an assertion
        # (torch 2.11 on an H200; pytorch/pytorch issue 197077).
        options["triton.coalesce_tiling_analysis"] = False
        # Without this option Inductor compiles twice (12 blocks took 45 s): above some size, two
        # reductions over one tensor are faster fused (torch 2.11 on an H200).
        options["triton.mix_order_reduction_non_strict_mode"] = True
    return torch.compile(model.nll, fullgraph=True, options=options, dynamic=dynamic)


def _largest(tasks: tuple[Task, ...]) -> Sizes:
    """Returns the largest numbers of context and of target points."""
    return max(task.n_context for task in tasks), max(task.n_target for task in tasks)


def _shares(tasks: tuple[Task, ...]) -> list[float | torch.Tensor | None]:
    """Returns each task's share of all targets, or None for a single task."""
    if len(tasks) == 1:
        return [None]
    counts = [
        task.batch * task.n_target if task.target_lengths is None else task.target_lengths.sum()
        for task in tasks
    ]
    return [count / sum(counts) for count in counts]


def _adamw(
    model: TransformerNP, learning_rate: float, weight_decay: float, device: torch.device
) -> torch.optim.Optimizer:
    learning_rate = _not_negative("learning_rate", learning_rate)
    on_cuda = device.type == "cuda"
    return torch.optim.AdamW(
        model.parameters(),
        # A learning rate on the device can change between replays, and never waits for it.
        lr=torch.tensor(learning_rate, device=device) if on_cuda else learning_rate,
        weight_decay=_not_negative("weight_decay", weight_decay),
        fused=True,
        capturable=on_cuda,
    )


def _check_model(model: object) -> None:
    """Raises TypeError or ValueError if a step would not train the whole model."""
    if not isinstance(model, TransformerNP):
        sentence = f"model is a {type(model).__name__}: it must be a TransformerNP"
        if isinstance(getattr(model, "_orig_mod", None), TransformerNP):
            sentence += ": hand over its _orig_mod, whose variant's `compile` compiles the step"
        elif hasattr(model, "process_group"):
            sentence += (
                ": a step adds up no gradients of other processes, so write that loop yourself, "
                "or hand over its .module to train it in this process alone"
            )
        elif isinstance(getattr(model, "module", None), TransformerNP):
            sentence += ": hand over its .module, or the model that it was made of"
        raise TypeError(sentence)
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise ValueError(
            "model was compiled in place, which a step ignores: leave model.compile() out and "
            "choose a variant whose `compile` is True"
        )
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        raise TypeError("the model's parameters are DTensors: a step takes only whole tensors")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "no parameter of the model asks for a gradient: there is nothing to train, unless "
            "model.requires_grad_(True) is called for all of it or for a part"
        )
    require_no_weight_in_padding(model)


def _check_padding(optimizer: torch.optim.Optimizer, model: TransformerNP) -> None:
    """Raises ValueError if updates of padded layers would depend on their padding."""
    if model.heads.width == model.heads.d_ff:
        return
    layers = [module for module in model.modules() if isinstance(module, HiddenLayer)]
    padded = {id(weight) for layer in layers for weight in (layer.up, layer.down)}
    for group in optimizer.param_groups:
        if padded & {id(p) for p in group["params"]} and not _is_elementwise(optimizer, group):
            raise ValueError(
                f"{type(optimizer).__name__} may not update each weight by itself, and hidden "
                f"layers are padded from {model.heads.d_ff} to {model.heads.width} units: make the "
                "model with dataclasses.replace(variant, d_ff_storage=None), or choose a d_ff that "
                "needs no padding"
            )


def _is_elementwise(optimizer: torch.optim.Optimizer, group: dict) -> bool:
    """Returns whether two updates of a small matrix are the same with zeros around it."""
    weight, found = torch.arange(1.0, 7.0, device=group["params"][0].device).view(3, 2), []
    for padding in (0, 1):
        parameter = torch.nn.Parameter(F.pad(weight, (0, padding, 0, padding)))
        probe = object.__new__(type(optimizer))
        vars(probe).update(vars(optimizer))
        probe.state, probe.param_groups = defaultdict(dict), [group | {"params": [parameter]}]
        probe.param_groups[0]["lr"] = 0.1
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(probe, hooks, OrderedDict())
        for sign in (1.0, -0.5):
            parameter.grad = F.pad(sign * weight.flip(0), (0, padding, 0, padding))
            try:
                type(optimizer).step(probe)
            except Exception:  # an optimizer may raise any error for a small matrix
                return False
        found.append(parameter.detach()[:3, :2])
    return torch.allclose(*found, rtol=1e-4)


def _check_optimizer(optimizer: torch.optim.Optimizer, model: TransformerNP) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}: it must be a torch.optim.Optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss several times a step: choose another optimizer")
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not theirs & {id(p) for p in model.parameters()}:
        raise ValueError("the optimizer has no parameter of the model: give it model.parameters()")
    _check_padding(optimizer, model)


def _check_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer whose step cannot be captured."""
    for group in optimizer.param_groups:
        if not group.get("capturable", False):
            raise ValueError(
                f"{type(optimizer).__name__} cannot be captured in a CUDA graph: make it with "
                "capturable=True where it has that option (Adam, AdamW, NAdam, RMSprop and others "
                "do), or train with cuda_graph=False"
            )


def _put_rates_on(device: torch.device, optimizer: torch.optim.Optimizer) -> None:
    """Puts learning rates on the device: on the host they would be constants of the graph."""
    for group in optimizer.param_groups:
        rate = group["lr"]
        if not isinstance(rate, torch.Tensor) or rate.device != device:
            group["lr"] = torch.tensor(float(rate), device=device)
