"""Says what studies of whole models run: their variants, gates and code, and what they take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tnp.dispatch.registry import block_of, catalog, is_automatic
from tnp.dispatch.spec import Call, Operator, Problem
from tnp.gates import gates_for, gates_of
from tnp.model.variants import Variant, most_storage, named_specs, with_storage
from workflow import problems
from workflow.faults import Fault, Place, listed, not_among

if TYPE_CHECKING:
    from workflow.studies import Config


class Use(NamedTuple):
    """Implementations that something runs: at the sizes of a model, or at sizes of its own."""

    place: Place
    implementations: Mapping[str, str]  # operator, or family → name
    model: Mapping[str, Any] | None = None
    model_place: Place = ("model",)


def variants(config: Config, model: Mapping[str, Any] | None = None) -> dict[str, dict]:
    """Returns name → fields of all variants: the package's, and the experiment's own.

    Hidden layers are stored as `model` needs it, the experiment's model if None.
    """
    d_ff = (model or config.model)["d_ff"]
    specs = named_specs() | config.variants
    return {name: with_storage(spec, d_ff) for name, spec in specs.items()}


def of_variant(
    name: str, spec: dict, sizes: Mapping, model: Mapping, checkpoint: bool, cuda_graph: bool
) -> dict[str, str]:
    """Returns columns of a variant's job: `operators`, as JSON, and `gates`, with "|" between."""
    variant = Variant.from_spec(name, spec)
    rows = sizes["batch"] * (sizes["n_context"] + sizes["n_target"])
    operators = variant.implementations()
    gates = gates_for(
        operators,
        checkpoint=checkpoint,
        cuda_graph=cuda_graph,
        skip_unread=variant.skip_unread,
        recompute=variant.recompute_above is not None and rows > variant.recompute_above,
        ragged="vary" in sizes or variant.pack,
        centred_keys=variant.centred_keys,
        buffer="buffer" in model,
    )
    return {"operators": json.dumps(operators), "gates": "|".join(gates)}


def implementations(job: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Returns (family, implementation) of all that a job's variant runs."""
    variant = Variant.from_spec(job["variant"], job["variant_spec"])
    found = variant.implementations()
    return set((found | (block_of(found) if variant.block else {})).items())


def use_of(config: Config, place: Place, name: str) -> Use:
    variant = Variant.from_spec(name, variants(config)[name])
    model = config.model | {"d_ff_storage": variant.d_ff_storage}
    return Use(place, variant.implementations(), model)


def faults_of_use(use: Use, config: Config, gates: list[str]) -> Iterator[Fault]:
    """Yields sizes that an implementation does not take, and gates of ours that are left out."""
    step = next(iter(config.shapes.values())) | {"dtype": config.compute_dtype["cuda"]}
    for key, name in use.implementations.items():
        for operator in catalog().operators.values():
            if key not in (operator.name, operator.family):
                continue
            problem = operator.within(use.model, step) if use.model else None
            reason = None if problem is None else refusal(operator, name, problem, trains=True)
            if reason is not None:
                yield Fault(use.model_place, f"{operator.name} {reason}")
            missing = [gate for gate in gates_of(operator.name, name) if gate not in gates]
            if missing:
                what = f"gates must name {listed(missing)}, which it waits for"
                yield Fault(use.place, f"{operator.name} {name!r} cannot be used: {what}")


def refusal(operator: Operator, name: str, problem: Problem, trains: bool) -> str | None:
    """Returns why one of ours or PyTorch's does not run a problem on a GPU, or None.

    An implementation that is forward only may be timed, and is refused where it `trains`.
    """
    own = None if is_automatic(name) else catalog().listed(operator.name, name).own
    if own is None or own.compile:
        return None
    wanted = own.gradients or operator.differentiated if trains or own.differentiable else ()
    reason = own.limits(Call(problem, problems.target("cuda"), wanted))
    return reason and f"{name!r} cannot run it: {reason}"


def faults_of_model(place: Place, model: Mapping[str, Any]) -> Iterator[Fault]:
    d_model, n_heads = model["d_model"], model["n_heads"]
    if d_model % n_heads:
        what = f"d_model {d_model} must be a multiple of n_heads {n_heads}"
        yield Fault(place, what, ("n_heads",))


def faults_of_names(
    config: Config, place: Place, names: list[str], buffer: bool = False
) -> Iterator[Fault]:
    """Yields variants that are not known, or cannot run the experiment's model."""
    known = variants(config)
    yield from not_among(place, "variant", names, known)
    for index, name in enumerate(names):
        yield from faults_of_storage((*place, index), known[name], config.model)
        if buffer:
            yield from faults_of_buffer((*place, index), name, known)


def faults_of_shapes(config: Config, place: Place, names: list[str]) -> Iterator[Fault]:
    """Yields shapes that are not known, or whose sizes vary."""
    yield from not_among(place, "shape", names, config.shapes)
    for index, name in enumerate(names):
        if "vary" in config.shapes[name]:
            what = f"the sizes of {name!r} vary: name a shape whose sizes do not"
            yield Fault((*place, index), what)


def faults_of_storage(place: Place, spec: Mapping, model: Mapping) -> Iterator[Fault]:
    storage, d_ff = spec.get("d_ff_storage"), model["d_ff"]
    if storage is not None and storage is not True and storage < d_ff:
        yield Fault(
            (*place, "d_ff_storage"),
            f"{storage} is smaller than the model's d_ff: it must be at least {d_ff}",
        )


def faults_of_widest(place: Place, spec: Mapping, model: Mapping) -> Iterator[Fault]:
    storage, most = spec.get("d_ff_storage"), most_storage(model["d_ff"])
    if storage is not None and storage > most:
        what = f"{storage} is wider than the model needs: it must be at most {most}, or true"
        yield Fault((*place, "d_ff_storage"), what)


def faults_of_buffer(place: Place, name: str, known: Mapping[str, dict]) -> Iterator[Fault]:
    refused = Variant.from_spec(name, known[name]).refuses_buffer
    if refused:
        yield Fault(place, f"{name!r} {refused}: name a variant that can")
