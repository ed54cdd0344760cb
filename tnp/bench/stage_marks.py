"""Marks in a profile where each stage of a training step begins.

A mark is an empty range of the profiler. One thread launches the whole step, so a kernel belongs to
the last mark before its launch. Marks are set

- where modules run forward, also where a checkpoint repeats them in the backward pass;
- before each of autograd's nodes, which are numbered in the order in which they are made: a node
  belongs to the stage whose forward pass made it;
- in Inductor's generated code, before each of its kernels, by the nodes that a kernel computes:
  hooks of modules would have to be compiled there.
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
    """Returns the name of a mark."""
    return f"{MARK}:{stage}:{pass_}"


def parsed(name: str) -> tuple[str, str] | None:
    """Returns stage and pass of a mark's name, or None for any other range."""
    first, *rest = name.split(":")
    return tuple(rest) if first == MARK and len(rest) == 2 else None


@contextmanager
def marking(step: TrainingStep) -> Iterator[None]:
    """Makes steps inside the block, run by `step._run`, set marks. A compiled one is recompiled."""
    marks = _Marks(step.model)
    compiled = step.model.variant.compile
    with ExitStack() as stack:
        stack.enter_context(_marks_in_generated_code() if compiled else marks.around_modules())
        handle = step.optimizer.register_step_pre_hook(lambda *_: _mark("optimizer", "optimizer"))
        stack.callback(handle.remove)
        stack.callback(setattr, step, "nll", step.nll)
        step.nll = marks.around(step.nll)
        yield


def _mark(stage: str, pass_: str) -> None:
    with torch.profiler.record_function(text(stage, pass_)):
        pass


class _Marks:
    """Follows the step on this thread: its stage, and the numbers of autograd's nodes."""

    def __init__(self, model: TransformerNP) -> None:
        self._modules = [(s, m) for m in model.modules() if (s := STAGE_OF.get(type(m).__name__))]
        self._parameters = {id(p): stage for stage, m in self._modules for p in m.parameters()}
        self._now, self._pass = OTHER, "forward"
        self._first: list[tuple[int, str]] = []  # number of a stage's first node, and the stage

    def _enter(self, stage: str) -> None:
        self._now = stage
        if self._pass == "forward":
            self._first.append((torch.autograd._get_sequence_nr(), stage))
        _mark(stage, self._pass)

    def around(self, nll: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wraps `nll`, after which the backward pass begins."""

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
        """Makes modules of a stage mark both ends of their calls, also if a call raises."""
        left: list[str] = []
        with ExitStack() as stack:
            for stage, module in self._modules:

                def begin(_: nn.Module, __: object, stage: str = stage) -> None:
                    left.append(self._now)
                    self._enter(stage)

                def end(_: nn.Module, __: object, ___: object, stage: str = stage) -> None:
                    before = left.pop()
                    # The loss follows the heads in the forward pass.
                    self._enter("loss" if stage == "heads" else before)

                stack.callback(module.register_forward_pre_hook(begin).remove)
                stack.callback(module.register_forward_hook(end, always_call=True).remove)
            yield

    def _stage_of(self, node: torch.autograd.graph.Node) -> str:
        parameter = getattr(node, "variable", None)
        if parameter is not None:  # the node adds to its gradient, and is older than this step
            return self._parameters.get(id(parameter), OTHER)
        at = bisect(self._first, node._sequence_nr(), key=lambda first: first[0]) - 1
        return self._first[at][1] if at >= 0 else OTHER

    def _entering(self, stage: str) -> Callable[[tuple], None]:
        return lambda _: self._enter(stage)


def _nodes(loss: torch.Tensor) -> Iterator[torch.autograd.graph.Node]:
    """Yields all nodes of the graph behind `loss`."""
    met, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in met:
            met.add(node)
            left += [following for following, _ in node.next_functions]
            yield node


@contextmanager
def _marks_in_generated_code() -> Iterator[None]:
    """Makes code that Inductor compiles inside the block mark each kernel's stage.

    Nothing is cached: code compiled before or inside the block is recompiled on its next run.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config, ir, scheduler
    from torch._inductor.codegen import cpp, triton
    from torch._inductor.virtualized import V

    def write(origins: Iterable[fx.Node]) -> None:
        pass_ = "backward" if V.graph.is_backward else "forward"
        mark = text(stage_of_nodes(origins), pass_)
        V.graph.wrapper_code.writeline(f"with torch.profiler.record_function({mark!r}): pass")

    # Inductor writes a comment for each kernel that it calls. The mark follows the comment.
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
            # `origins` may include the makers of the operands. Products have one `origin_node`.
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
    """Returns the stage of most of `nodes`, which one kernel computes, or "other".

    Views compute nothing and do not count. Sums of gradients do not count: no module made them.
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
