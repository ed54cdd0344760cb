"""Counts what the host does in one training step, by kind.

    python -m tnp.bench.host_counts --shape small --variant fused
    python -m tnp.bench.host_counts --shape small --variant pytorch_best --json

On a GPU the step has the sizes of config.yaml and starts on an idle device. Without a GPU, our
launches do nothing, plans are made for `--gpu`, and PyTorch's operators run on the CPU. The model
is then narrow and its task small, so that products take little time. It has as many layers as
config.yaml says. Some operators launch one kernel less for so few points.

Only outermost calls count: a `transpose` that calls `as_strided` is one view. Microseconds of a
kind leave out other kinds inside it. PyTorch's profiler makes them longer, so the total is timed
without it. Code of `torch.compile` allocates and makes views without the dispatcher, uncounted.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from unittest.mock import patch

from tnp.dispatch import devices
from tnp.dispatch.spec import OWN
from tnp.experiment.failures import Unsupported
from tnp.model.variants import Variant, named_specs
from tnp.util.cli import Parser, end_with, table
from tnp.util.extras import require

ROOT = Path(__file__).parents[2]
LAUNCH = "launch of ours"
FORWARD, BACKWARD = "autograd functions, forward", "autograd functions, backward"
PRODUCTS, OPTIMIZER, OTHER = "library products and attention", "optimizer", "other operators"
# Kind → pattern for names of the profiler's events. The first match counts.
KINDS = {
    "launches of ours": LAUNCH,
    "custom operators": r"tnp\w*::.*",
    "launches of compiled kernels": r"triton_.*",
    "compiled code around them": r"Torch-Compiled.*|TorchDynamo.*|AOTDispatcher.*|.*CompiledFx.*",
    "autograd's engine": r"autograd::.*|torch::autograd::.*|\w+Backward\d+",
    PRODUCTS: r"aten::(\w*(mm|matmul|linear|dot|mv)_?|\w*(dot_product|_attention|_addmm_)\w*)",
    "allocations": r"aten::(new_)?(empty|zeros|ones|full)(_strided|_like|_permuted)?",
    "copies and casts": r"aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_foreach_copy_|pad)",
    "views": r"(aten::)?(as_strided|_?(unsafe_|reshape_)?(view|alias)|reshape|split\w*|narrow|t|"
    r"transpose|permute|slice|select|expand\w*|chunk|unbind|(un)?squeeze|(un)?flatten|detach)_?",
}
PYTHON, IN_TNP = "calls of Python functions", "calls of Python functions of tnp"
TENSOR_CALLS = ("data_ptr", "stride")  # methods in C that are called very often
PROFILED, TIMED, WARM = 5, 20, 3  # steps
# Without a GPU:
NARROW = {"d_model": 64, "n_heads": 1, "d_ff": 160}
FEW_POINTS = {"batch": 2, "n_context": 8, "n_target": 16}

Run = Callable[[], object]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit code 0, 1 if the variant cannot run here, or 2 for wrong arguments."""
    parser = Parser(prog="python -m tnp.bench.host_counts", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--shape", required=True, metavar="NAME", help="of config.yaml's shapes")
    parser.add_argument(
        "--variant", required=True, metavar="NAME", help="of tnp/model/variants.toml"
    )
    parser.add_argument("--gpu", default="NVIDIA H200", metavar="NAME",
                        help="without a GPU: the one to make plans for; NVIDIA H200")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="an object in place of a table")
    wanted = parser.parse_args(arguments)
    try:
        parameters, target = _parameters(wanted.shape, wanted.variant), devices.named(wanted.gpu)
    except ValueError as error:
        parser.error(str(error))
    try:
        found = count_step(parameters, target)
    except Unsupported as error:
        print(f"{wanted.variant!r} cannot run here: {error}", file=sys.stderr)
        return 1
    if wanted.json:
        print(json.dumps(found))
        return 0
    seen = [row for row in found["kinds"] if row["count"]]
    rows = [(row["kind"], _shown(row["count"]), _shown(row["us"])) for row in seen]
    print(table(("a step, " + found["where"], "count", "µs"), rows, right=(1, 2)))
    print(f"\n{found['host_us']:,.0f} µs until the call of a step returns, without the profiler")
    return 0


def _shown(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}" if number >= 10 else f"{number:,.3g}"


def _parameters(shape: str, variant: str) -> dict:
    """Returns the parameters of `tnp.bench.host_steps.step_of`; ValueError for unknown names."""
    config = require("yaml", "counts", "workflow").safe_load((ROOT / "config.yaml").read_text())
    specs = named_specs() | config.get("variants", {})
    for what, name, known in (("shape", shape, config["shapes"]), ("variant", variant, specs)):
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}: choose from {', '.join(known)}")
    if "vary" in config["shapes"][shape]:
        raise ValueError(f"the sizes of shape {shape!r} vary: name a shape whose sizes do not")
    return {
        **config["shapes"][shape],
        "model": config["model"],
        "dtype": config["compute_dtype"]["cuda"],
        "variant": variant,
        "variant_spec": specs[variant],
        "cuda_graph": False,
        "replicate": 1,
    }


def count_step(parameters: dict, target: devices.Target) -> dict:
    """Returns `where`, `host_us` (the median of a step) and `kinds`, the rows of `count`.

    Args:
        parameters: the parameters of `tnp.bench.host_steps.step_of`.
        target: the GPU to make plans for, if there is none here.

    Raises:
        Unsupported: this device cannot run the variant; the message says why.
    """
    import torch

    from tnp.bench.host_steps import host_ms, step_of

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    variant = Variant.from_spec(parameters["variant"], parameters["variant_spec"])
    if device.type == "cuda":
        where, here = torch.cuda.get_device_name(), nullcontext()
    else:
        parameters = parameters | FEW_POINTS | {"model": parameters["model"] | NARROW}
        target = target if variant.role() == OWN else devices.CPU
        where, here = f"without launches, {target.model or 'CPU'}", _as_on(target)
    with here:
        run = step_of(parameters, device)
        for _ in range(WARM):
            run()
        spans = [host_ms(run, device) for _ in range(TIMED)]
        kinds = count(run)
    return {"where": where, "host_us": 1e3 * statistics.median(spans), "kinds": kinds}


@contextmanager
def _as_on(target: devices.Target) -> Iterator[None]:
    """Makes the CPU stand for a target inside the block. Launches do nothing there."""
    import torch

    from tnp.bench.host import launching_nothing
    from tnp.tasks.task import Task

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a small product would mostly be threads that wait for each other
    try:
        with (
            patch.object(devices, "of_device", lambda device: target),
            patch.object(Task, "check_finite", lambda self, units: None),  # runs on CPUs only
            launching_nothing(),
        ):
            yield
    finally:
        torch.set_num_threads(threads)


def count(run: Run) -> list[dict]:
    """Returns rows of `kind`, `count` and `us` for a call of `run`, which has run before.

    `us` is None for calls of Python, which a separate pass counts.
    """
    from torch.profiler import ProfilerActivity, profile

    with _launches_seen(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED):
            run()
    counts, times = of_events(profiler.events())
    kinds = [FORWARD, BACKWARD, *KINDS, OPTIMIZER, OTHER]
    rows = [{"kind": k, "count": counts[k] / PROFILED, "us": times[k] / PROFILED} for k in kinds]
    return rows + [{"kind": k, "count": n, "us": None} for k, n in _python_calls(run).items()]


def of_events(events: Sequence) -> tuple[Counter, Counter]:
    """Returns counts of outermost calls, and microseconds without inner kinds, both by kind.

    All that an optimizer calls is of kind "optimizer".
    """
    import torch

    functions = [torch.autograd.Function]
    for one in functions:  # the list grows meanwhile
        functions += one.__subclasses__()
    names = "|".join(re.escape(one.__name__) for one in functions)
    kinds = {FORWARD: names, BACKWARD: f"(?:{names})Backward", **KINDS}
    patterns = {kind: re.compile(pattern) for kind, pattern in kinds.items()}
    found: dict = {None: ""}

    def kind_of(event) -> str:
        if event not in found:
            kind = OPTIMIZER if event.name.startswith("Optimizer.") else named(event.name)
            found[event] = OPTIMIZER if kind_of(event.cpu_parent) == OPTIMIZER else kind
        return found[event]

    @cache
    def named(name: str) -> str:
        return next((kind for kind, one in patterns.items() if one.fullmatch(name)), OTHER)

    counts, times = Counter(), Counter()
    for event in events:
        counts[kind_of(event)] += kind_of(event) != kind_of(event.cpu_parent)
        times[kind_of(event)] += event.self_cpu_time_total
    return counts, times


@contextmanager
def _launches_seen() -> Iterator[None]:
    """Makes each launch of ours an event of the profiler inside the block."""
    from torch.profiler import record_function

    from tnp.dispatch.launcher import Bound

    launch = Bound.__call__

    def seen(self, *arguments):
        with record_function(LAUNCH):
            return launch(self, *arguments)

    with patch.object(Bound, "__call__", seen):
        yield


def _python_calls(run: Run) -> dict[str, int]:
    """Returns how many functions of Python one call of `run` calls, by kind."""
    counts = dict.fromkeys((PYTHON, IN_TNP, *map("calls of Tensor.{}".format, TENSOR_CALLS)), 0)
    ours = str(ROOT / "tnp")

    def seen(frame, event: str, argument: object) -> None:
        if event == "call":
            counts[PYTHON] += 1
            counts[IN_TNP] += frame.f_code.co_filename.startswith(ours)
        elif event == "c_call" and argument.__name__ in TENSOR_CALLS:
            counts[f"calls of Tensor.{argument.__name__}"] += 1

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counts


if __name__ == "__main__":
    end_with(main)
