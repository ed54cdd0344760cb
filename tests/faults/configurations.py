"""Bad configurations, made from a good one: each must be refused in one sentence, with its line.

Tables of what two values must agree on, and of text that is no YAML, are in `tests/workflow`.
"""

import re
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import yaml

from tests.workflow.conftest import changed, configuration
from workflow.configuration import places
from workflow.validation import validate

Keys = tuple[str | int, ...]  # the way to a value: keys, and positions in lists

# What is wrong at a value, by the type of what is right there.
WRONG: dict[type, list[object]] = {
    bool: ["maybe", 1, None, []],
    int: ["many", -1, 2.0, 2**31, float("nan"), float("inf"), None, [], {}, True],
    float: ["many", -1.0, float("nan"), float("inf"), None, [], True],
    str: ["no_such_name", "", 5, None, []],
    list: ["one", None, {}, [5], ["no_such_name"]],
    dict: ["one", None, 5, []],
}
# Keys that may be missing, by the keys above them.
OPTIONAL = {
    (): {"ablation", "ops", "steps", "training", "tuning"},
    ("ablation",): {"devices"},
    ("ablation", "shapes", "tiny"): {"replicates"},
    ("steps",): {"cpu"},
    ("steps", "cpu"): {"checkpoint", "devices", "replicates"},
    ("ops",): {"attention"},
    ("ops", "attention"): {"devices", "replicates"},
    ("training",): {"gp_tiny"},
    ("training", "gp_tiny"): {"devices"},
    ("variants",): {"sdpa_flash"},  # variants.toml has it too
    ("variants", "*"): {"projection"},
}


class Case(NamedTuple):
    """A configuration that must be refused, and the line that must be named; None where none is."""

    name: str
    config: dict
    line: int | None


@cache
def valid() -> dict:
    """The tests' tiny configuration with every section that one may have; to be copied."""
    config = configuration()
    base, full = "sdpa_flash", "projection"
    config["variants"][full] = {"attention": "sdpa_flash", "projection": "fused"}
    config["gates"] += ["op--project_qkv--fused"]
    differing = [
        operator
        for operator, implementation in config["variants"][full].items()
        if config["variants"][base].get(operator) != implementation
    ]
    config["ablation"] = {
        "devices": ["cpu"],
        "priority": 1,
        "base": base,
        "full": full,
        "components": differing,
        "shapes": {"tiny": {"cuda_graph": False, "replicates": 1}},
    }
    config["timing"]["timeout_s"] = 120.0
    config["tuning"] = {"shapes": ["tiny"], "operators": ["attention"]}
    return config


def refusal(config: dict, folder: Path) -> str | None:
    """Returns what is said of a configuration before anything is planned, or None."""
    folder.joinpath("config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    with chdir(folder):
        try:
            validate(config, places("config.yaml", [], {}))
        except ValueError as error:
            return str(error)
    return None


def _nodes(node: object, path: Keys = ()) -> Iterator[tuple[Keys, object]]:
    """Everything in a configuration but the items of lists, each with the way to it."""
    yield path, node
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _nodes(value, (*path, key))


def _line(text: str, path: Keys) -> int | None:
    """The line of the key or the item that `path` ends in; None for the whole file."""
    node, line = yaml.compose(text), None
    for part in path:
        if isinstance(node, yaml.SequenceNode):
            key = node = node.value[part]
        else:
            key, node = next(pair for pair in node.value if pair[0].value == part)
        line = key.start_mark.line + 1
    return line


def _case(what: str, path: Keys, config: dict, at: Keys | None = None) -> Case:
    line = _line(yaml.safe_dump(config, sort_keys=False), path if at is None else at)
    return Case(f"{'.'.join(path)} {what}", config, line)


def cases() -> Iterator[Case]:
    """Another type, out of range, not finite, an unknown name, a key missing or unknown."""
    for path, node in _nodes(valid()):
        for value in WRONG[type(node)] if path else ():
            if value != node:
                at = (*path, 0) if isinstance(node, list) and isinstance(value, list) else path
                yield _case(f"= {value!r}", path, changed(valid(), path, value), at)
        if isinstance(node, list) and node:
            yield _case("twice the same", path, changed(valid(), path, [node[0], node[0]]))
        if isinstance(node, dict):
            for name in ("no_such_key", "Not A Name"):
                config = changed(valid(), (*path, name), 5)
                yield _case("unknown", (*path, name), config)
            pattern = ("variants", "*") if path[:1] == ("variants",) and path[1:] else path
            for key in node.keys() - OPTIONAL.get(pattern, set()):
                config = changed(valid(), path, {k: v for k, v in node.items() if k != key})
                # Who misses the key may stand elsewhere: a name that is used and nowhere defined.
                named = None if path in (("shapes",), ("variants",)) else path
                yield _case("missing", (*path, key), config, named or ())


def _unclear(case: Case, sentence: str | None) -> str | None:
    """Why `sentence` does not do."""
    if sentence is None:
        return "is accepted"
    if "\n" in sentence:
        return f"is refused in more than one line: {sentence!r}"
    if not sentence.startswith("config.yaml"):
        return f"is refused without its file's name: {sentence!r}"
    lines = {int(number) for number in re.findall(r"\bline (\d+)", sentence)}
    if case.line is not None and case.line not in lines:
        return f"is refused without line {case.line}: {sentence!r}"
    return None


def run(n: int, folder: Path, random: Random) -> list[str]:
    """Returns a sentence for each of `n` cases that is accepted or refused unclearly.

    Raises:
        ValueError: the configuration that all are made from is refused itself.
    """
    if sentence := refusal(valid(), folder):
        raise ValueError(f"the valid configuration is refused: {sentence}")
    everything = list(cases())
    chosen = random.sample(everything, min(n, len(everything)))
    found = [(case, _unclear(case, refusal(case.config, folder))) for case in chosen]
    return [f"{case.name} {problem}" for case, problem in found if problem]
