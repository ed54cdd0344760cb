"""Marks in a profile of a training step: the moments at which another of its stages begins.

A mark is a range of the profiler's without an inside. All of a step is launched by one thread, so
that a kernel is of the stage whose mark came last before its launch. Marks are set

- where modules run forward, also where a checkpoint runs them again in the backward pass;
- before each of autograd's nodes, which is of the stage in which the forward pass made it: nodes
  are numbered in the order in which they are made;
- in what Inductor generates, before each of its kernels, by what the compiler knows of the nodes
  that a kernel computes. Hooks of modules are no part of that code, and would have to be compiled.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import fx, nn

from tnp.model.transformer_np import TransformerNP
from tnp.train.step import TrainingStep

MARK = "tnp.stage"
OTHER = "other"
STAGE_OF = {"Embedding": "embed", "Attention": "attention", "MLP": "mlp", "MixtureHeads": "heads"}


def text(stage: str, pass_: str) -> str:
    """The name of a mark."""
    return f"{MARK}:{stage}:{pass_}"


def parsed(name: str) -> tuple[str, str] | None:
    """Stage and pass of a mark of this name; None of any other range."""
    first, *rest = name.split(":")
    return tuple(rest) if first == MARK and len(rest) == 2 else None


@contextmanager
def marking(step: TrainingStep) -> Iterator[None]:
    """Steps in here, run by `step._run`, set marks; a compiled one is compiled anew for them."""
    marks = _Marks(step.model)
    with ExitStack() as stack:
        if step.model.variant.compile:
            stack.enter_context(_marks_in_generated_code())
        else:
            stack.enter_context(marks.around_modules())
        handle = step.optimizer.register_step_pre_hook(lambda *_: _mark("optimizer", "optimizer"))
        stack.callback(handle.remove)
        stack.callback(setattr, step, "nll", step.nll)
        step.nll = marks.around(step.nll)
        yield


def _mark(stage: str, pass_: str) -> None:
    with torch.profiler.record_function(text(stage, pass_)):
        pass


class _Marks:
    """Of the step on this thread: where it is, and which numbers autograd's nodes have there."""

    def __init__(self, model: TransformerNP) -> None:
        self._modules = [(s, m) for m in model.modules() if (s := STAGE_OF.get(type(m).__name__))]
        self._parameters = {id(p): stage for stage, m in self._modules for p in m.parameters()}
        self._now, self._pass = OTHER, "forward"
        self._first: list[tuple[int, str]] = []  # number of the first node, and the stage it is of

    def _enter(self, stage: str) -> None:
        self._now = stage
        if self._pass == "forward":
            self._first.append((torch.autograd._get_sequence_nr(), stage))
        _mark(stage, self._pass)

    def around(self, nll: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`nll`, after which the backward pass begins."""

        def run(*task: torch.Tensor | None) -> torch.Tensor:
            self._pass, self._first = "forward", []
            self._enter(OTHER)
            loss = nll(*task)
            self._pass = "backward"
            self._enter("loss")
            for node in _nodes(loss):
                node.register_prehook(self._entering(self._stage_of(node)))
            return loss

        return run

    @contextmanager
    def around_modules(self) -> Iterator[None]:
        """Modules of a stage mark both ends of their calls, also of one that does not finish."""
        left: list[str] = []
        with ExitStack() as stack:
            for stage, module in self._modules:

                def begin(_: nn.Module, __: object, stage: str = stage) -> None:
                    left.append(self._now)
                    self._enter(stage)

                def end(_: nn.Module, __: object, ___: object, stage: str = stage) -> None:
                    before = left.pop()
                    # What follows the heads in the forward pass is the loss.
                    self._enter("loss" if stage == "heads" else before)

                stack.callback(module.register_forward_pre_hook(begin).remove)
                stack.callback(module.register_forward_hook(end, always_call=True).remove)
            yield

    def _stage_of(self, node: torch.autograd.graph.Node) -> str:
        parameter = getattr(node, "variable", None)
        if parameter is not None:  # it adds to the gradient, and was not made in this step
            return self._parameters.get(id(parameter), OTHER)
        at = bisect(self._first, node._sequence_nr(), key=lambda first: first[0]) - 1
        return self._first[at][1] if at >= 0 else OTHER

    def _entering(self, stage: str) -> Callable[[tuple], None]:
        return lambda _: self._enter(stage)


def _nodes(loss: torch.Tensor) -> Iterator[torch.autograd.graph.Node]:
    """All of the graph behind `loss`."""
    met, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in met:
            met.add(node)
            left += [following for following, _ in node.next_functions]
            yield node


@contextmanager
def _marks_in_generated_code() -> Iterator[None]:
    """What Inductor compiles in here, nothing of it cached, marks the stage of each kernel.

    All that was compiled before or in here is compiled anew when it runs next.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config, ir, scheduler
    from torch._inductor.codegen import cpp, triton
    from torch._inductor.virtualized import V

    def write(origins: Iterable[fx.Node]) -> None:
        pass_ = "backward" if V.graph.is_backward else "forward"
        mark = text(stage_of_nodes(origins), pass_)
        V.graph.wrapper_code.writeline(f"with torch.profiler.record_function({mark!r}): pass")

    # Inductor comments each kernel that it calls, and the mark goes behind the comment.
    def of_kernel(comment: Callable) -> Callable:
        def codegen_comment(self: object, schedule: list, *rest: object) -> None:
            comment(self, schedule, *rest)
            parts = [s for s in schedule if isinstance(s, scheduler.BaseSchedulerNode)]
            nodes = [node.node for part in parts for node in part.get_nodes()]
            write({origin for node in nodes if node is not None for origin in node.origins})

        return codegen_comment

    def of_call(comment: Callable) -> Callable:
        def codegen_comment(self: ir.ExternKernel, *rest: object) -> None:
            comment(self, *rest)
            # Origins may hold what the operands were made of; the one node is there for products.
            write({self.origin_node} if self.origin_node is not None else self.origins)

        return codegen_comment

    patched = [
        (triton.TritonScheduling, of_kernel),
        (cpp.CppScheduling, of_kernel),
        (ir.ExternKernel, of_call),
    ]
    with ExitStack() as stack:
        stack.enter_context(config.patch(fx_graph_cache=False))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        for owner, wrapped in patched:
            stack.callback(setattr, owner, "codegen_comment", owner.codegen_comment)
            owner.codegen_comment = wrapped(owner.codegen_comment)
        torch._dynamo.reset()
        stack.callback(torch._dynamo.reset)
        yield


def stage_of_nodes(nodes: Iterable[fx.Node]) -> str:
    """The stage that most of `nodes`, which one kernel computes, are of; "other" where none is.

    Views compute nothing and do not count, nor do sums of gradients, which no module has made.
    """
    found = Counter(filter(None, map(_stage_of_node, nodes))).most_common(2)
    if not found or len(found) == 2 and found[0][1] == found[1][1]:
        return OTHER
    return found[0][0]


def _stage_of_node(node: fx.Node) -> str | None:
    schema = getattr(node.target, "_schema", None)
    if schema is None or any(result.alias_info for result in schema.returns):
        return None
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not modules:  # the loss is no module
        return "loss" if "mixture_nll(" in (node.meta.get("stack_trace") or "") else None
    names = [getattr(kind, "__name__", str(kind)) for _, kind in modules.values()]
    return next((s for name in names if (s := STAGE_OF.get(name.rpartition(".")[2]))), None)
