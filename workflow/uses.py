"""Where config.yaml uses an implementation, and whether it can be used there."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from tnp.bench.outcome import JOINT
from tnp.dispatch.registry import catalog, is_automatic
from tnp.dispatch.spec import Call, Operator, Problem
from tnp.gates import gates_of, gates_of_training
from tnp.model.variants import Variant
from workflow import problems
from workflow.configuration import Place
from workflow.faults import Fault, listed
from workflow.operator_plan import NOISE, PROFILES
from workflow.plan import HOST, HOST_FORMS, PREDICTIONS, variants

ENDS = ("base", "full")  # of the ablation


class Use(NamedTuple):
    """Implementations that something runs at the sizes of a model."""

    place: Place
    implementations: Mapping[str, str]  # operator, or family → name
    model: Mapping[str, int]
    model_place: Place
    run: Mapping[str, object]  # a step's sizes and dtype, as `Operator.within` takes them
    trains: bool = True


def uses(config: dict) -> Iterator[Use]:
    """Of steps, the ablation, benchmarks of operators and training runs."""
    sizes = next(iter(config["shapes"].values()))
    step = sizes | {"dtype": config["compute_dtype"]["cuda"]}

    def of_variant(place: Place, name: str) -> Use:
        variant = Variant.from_spec(name, variants(config)[name])
        model = config["model"] | {"d_ff_storage": variant.d_ff_storage}
        return Use(place, variant.implementations(), model, ("model",), step)

    for study, spec in config["steps"].items():
        for index, name in enumerate(spec["variants"]):
            yield of_variant(("steps", study, "variants", index), name)
    for section in (PREDICTIONS, JOINT):
        for index, name in enumerate(config.get(section, {"variants": []})["variants"]):
            yield of_variant((section, "variants", index), name)
    of_host = config.get(HOST, {}).get("steps", {})
    for key in HOST_FORMS:
        for index, name in enumerate(of_host.get(key, [])):
            yield of_variant((HOST, "steps", key, index), name)
    for end in ENDS if "ablation" in config else ():
        yield of_variant(("ablation", end), config["ablation"][end])
    for place, op, spec in operators(config):
        for index, name in enumerate(spec["implementations"]):
            if is_automatic(name) or name in catalog().names(op):
                model = config["model"] | {"d_ff_storage": problems.storage(config, op, spec)}
                where = (*place, "implementations", index)
                yield Use(where, {op: name}, model, ("model",), step, trains=False)
    for run, spec in config["training"].items():
        use = of_variant(("training", run, "variant"), spec["variant"])
        if "model" in spec:
            use = use._replace(model=spec["model"], model_place=("training", run, "model"))
        yield use


def of_use(use: Use, gates: Collection[str]) -> Iterator[Fault]:
    """Sizes that an implementation does not take, and gates of ours that config.yaml leaves out."""
    for key, name in use.implementations.items():
        for operator in catalog().operators.values():
            if key not in (operator.name, operator.family):
                continue
            yield from _of_limits(use, operator, name)
            needed = gates_of(operator.name, name)
            if use.trains:
                needed += gates_of_training(operator.name, name)
            missing = [gate for gate in needed if gate not in gates]
            if missing:
                what = f"gates must name {listed(missing)}, which it waits for"
                yield Fault(use.place, f"{operator.name} {name!r} cannot be used: {what}")


def _of_limits(use: Use, operator: Operator, name: str) -> Iterator[Fault]:
    """What an implementation says of the model's sizes."""
    problem = operator.within(use.model, use.run)
    reason = None if problem is None else _refusal(operator, name, problem, use.trains)
    if reason is not None:
        yield Fault(use.model_place, f"{operator.name} {reason}")


def _refusal(operator: Operator, name: str, problem: Problem, trains: bool) -> str | None:
    """That one of ours or PyTorch's does not run a problem on a GPU, if it says so.

    One that is forward only is refused where it `trains`, and may be timed.
    """
    own = None if is_automatic(name) else catalog().listed(operator.name, name).own
    if own is None or own.compile:
        return None
    wanted = own.gradients or operator.differentiated if trains or own.differentiable else ()
    reason = own.limits(Call(problem, problems.target("cuda"), wanted))
    return reason and f"{name!r} cannot run it: {reason}"


def refusals(op: str, names: list[str], problem: Problem, device: str) -> Iterator[str]:
    """Why a problem cannot be timed: no gate is like it, or one that is named does not run it."""
    without = problems.without_case(problem, device)
    if without is not None:
        yield without
    for name in names if device == "cuda" else ():
        if name in catalog().names(op):
            reason = _refusal(catalog().operator(op), name, problem, trains=False)
            if reason is not None:
                yield reason


def operators(config: dict) -> Iterator[tuple[Place, str, dict]]:
    """(place, operator, study) of every operator that is benchmarked or profiled."""
    for name, study in config["ops"].items():
        if name != "ceilings":
            yield ("ops", name), problems.operator_of(name, study), study
    for op, study in config.get(NOISE, {"ops": {}})["ops"].items():
        yield (NOISE, "ops", op), op, study
    for name, study in config.get(PROFILES, {"ops": {}})["ops"].items():
        yield (PROFILES, "ops", name), problems.operator_of(name, study), study
