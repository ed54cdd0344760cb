"""Bad configurations, made from a good one: each must be refused in one sentence, with its line."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import yaml

from workflow.configuration import places
from workflow.validation import validate

ROOT = Path(__file__).parents[2]
STARTS_ONE_IN = 20  # Snakemake itself takes seconds to start: the others meet what it calls first

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
    content: bytes
    line: int | None


@cache
def valid() -> dict:
    """The tests' tiny configuration with every section that one may have; to be copied."""
    config = yaml.safe_load((ROOT / "tests/workflow/config.yaml").read_text())
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


def text_of(config: dict) -> str:
    return yaml.safe_dump(config, sort_keys=False)


def refusal(content: bytes, folder: Path) -> str | None:
    """What the workflow says of a configuration before it plans anything; None if nothing."""
    folder.joinpath("config.yaml").write_bytes(content)
    with chdir(folder):
        try:
            written = places("config.yaml", [], {})
            validate(yaml.safe_load(content), written)
        except ValueError as error:
            return str(error)
    return None


def cases() -> Iterator[Case]:
    yield from _of_values()
    yield from _of_relations()
    yield from _of_text()


def _nodes(node: object, path: Keys = ()) -> Iterator[tuple[Keys, object]]:
    """Everything in a configuration but the items of lists, each with the way to it."""
    yield path, node
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _nodes(value, (*path, key))


def _changed(path: Keys, value: object) -> dict:
    config = copy.deepcopy(valid())
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return config


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
    text = text_of(config)
    line = _line(text, path if at is None else at)
    return Case(f"{'.'.join(path)} {what}", text.encode(), line)


def _of_values() -> Iterator[Case]:
    """Another type, out of range, not finite, an unknown name, a key missing or unknown."""
    for path, node in _nodes(valid()):
        for value in WRONG[type(node)] if path else ():
            if value != node:
                at = (*path, 0) if isinstance(node, list) and isinstance(value, list) else path
                yield _case(f"= {value!r}", path, _changed(path, value), at)
        if isinstance(node, list) and node:
            yield _case("twice the same", path, _changed(path, [node[0], node[0]]))
        if isinstance(node, dict):
            for name in ("no_such_key", "Not A Name"):
                config = _changed((*path, name), 5)
                yield _case("unknown", (*path, name), config)
            pattern = ("variants", "*") if path[:1] == ("variants",) and path[1:] else path
            for key in node.keys() - OPTIONAL.get(pattern, set()):
                config = copy.deepcopy(valid())
                place = config
                for part in path:
                    place = place[part]
                del place[key]
                # Who misses the key may stand elsewhere: a name that is used and nowhere defined.
                named = None if path in (("shapes",), ("variants",)) else path
                yield _case("missing", (*path, key), config, named or ())


def _of_relations() -> Iterator[Case]:
    """Each value is right by itself, and two do not agree."""
    for name, changes in {
        "no whole number of heads": {"model.n_heads": 5},
        "no kernel for the head's width": {"model.n_heads": 1, "model.d_model": 24},
        "stored narrower than it is": {"variants.sdpa_flash.d_ff_storage": 40},
        "warm-up longer than the run": {"training.gp_tiny.warmup_steps": 21},
        "more points than a picture": {
            "training.gp_tiny.source": "images", "training.gp_tiny.n_context": 300_000,
        },
        "for benchmarks alone": {"variants.sdpa_flash.mlp": "compiled"},
        "a training named like a gate": {"training.baseline": valid()["training"]["gp_tiny"]},
        "a name of the ablation's": {"variants.only_mlp": {"attention": "sdpa_flash"}},
        "the ablation's own study": {"steps.ablation": valid()["steps"]["cpu"]},
        "a study named like an operator": {"steps.attention": valid()["steps"]["cpu"]},
        "nothing to take apart": {"ablation.full": "sdpa_flash"},
        "more points than an int": {
            "shapes.tiny.n_context": 2**31 - 1, "shapes.tiny.n_target": 2**31 - 1,
        },
    }.items():  # fmt: skip
        config = copy.deepcopy(valid())
        for path, value in changes.items():
            *parents, last = path.split(".")
            place = config
            for parent in parents:
                place = place[parent]
            place[last] = value
        yield Case(name, text_of(config).encode(), -1)


def _of_text() -> Iterator[Case]:
    """What is no YAML, or YAML that says something else than it seems to."""
    lines = text_of(valid()).splitlines()

    def case(name: str, number: int, new: list[str], line: int = 0) -> Case:
        """Line `number`, from 1, replaced by `new`; the line that must be named follows it."""
        content = [*lines[: number - 1], *new, *lines[number:]]
        return Case(f"{name} in line {number}", "\n".join(content).encode(), number + line)

    for number, line in enumerate(lines, 1):
        key, _, value = line.partition(": ")
        if not value:
            continue
        inner = line.startswith(" ")
        yield case("a key twice", number, [line, line], 1)
        if inner:
            yield case("a tab", number, [line.replace("  ", "\t", 1)])
        if number % 3 == 0:
            yield case("a quote not closed", number, [f'{key}: "{value}'])
            yield case("a bracket not closed", number, [f"{key}: [{value}"])
            yield case("a brace not closed", number, [f"{key}: {{a: {value}"])
            yield case("an unknown alias", number, [f"{key}: *nope"])
            yield case("two colons", number, [f"{key}: {value}: 3"])
            yield case("a tag", number, [f"{key}: !ours {value}"])
            yield case("a tag of Python", number, [f"{key}: !!python/name:os.system ''"])
            yield case("a control character", number, [f"{key}: {value}\x07"])
            yield case("a reserved character", number, [f"{key}: @{value}"])
            yield case("a number for a key", number, [line, re.sub(r"\S.*", "1: 2", line)], 1)
            yield case("a merge of no keys", number, [line, re.sub(r"\S.*", "<<: 5", line)], 1)
            yield case("a document's end", number, [line, "---", "a: 1"], 1)
            yield case("a date that is none", number, [f"{key}: 2026-13-45"])
            yield case("a date", number, [f"{key}: 2026-01-02"])
    whole = "\n".join(lines)
    for encoding in ("utf-16", "utf-32"):
        yield Case(encoding, whole.encode(encoding), 1)
    yield Case("Latin-1", whole.encode() + b"\n# caf\xe9\n", len(lines) + 1)
    yield Case("a cyclic anchor", whole.replace("model:", "model: &m\n  a: *m", 1).encode(), -1)
    tenfold = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    expanding = "\n".join(["a0: &a0 [1]", *tenfold, whole])
    yield Case("aliases of aliases", expanding.encode(), None)
    yield Case("nested too deeply", f"{whole}\ndeep: {'[' * 5000}{']' * 5000}".encode(), None)
    for name, content in {
        "an empty file": "", "a comment": "# device: cpu\n", "a list": "- device\n",
        "a word": "device\n", "nothing": "---\n...\n", "half a file": whole[: len(whole) // 2],
    }.items():  # fmt: skip
        yield Case(name, content.encode(), None)


def _unclear(case: Case, sentence: str | None) -> str | None:
    """Why `sentence` does not do."""
    if sentence is None:
        return "is accepted"
    if "\n" in sentence:
        return f"is refused in more than one line: {sentence!r}"
    if not sentence.startswith("config.yaml"):
        return f"is refused without its file's name: {sentence!r}"
    lines = {int(number) for number in re.findall(r"\bline (\d+)", sentence)}
    if case.line is not None and (not lines if case.line < 0 else case.line not in lines):
        where = "its line" if case.line < 0 else f"line {case.line}"
        return f"is refused without {where}: {sentence!r}"
    return None


def _started(case: Case, folder: Path) -> str | None:
    """Why a real start of the workflow does not refuse it as it should."""
    folder.mkdir()
    folder.joinpath("config.yaml").write_bytes(case.content)
    started = subprocess.run(
        [sys.executable, "-m", "snakemake", "all", "--cores", "1", "--directory", str(folder)],
        cwd=ROOT,
        env=os.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    said = started.stdout + started.stderr
    sentences = [line for line in said.splitlines() if "config.yaml" in line]
    if started.returncode == 0:
        return "starts the workflow"
    if "Traceback" in said or len(sentences) != 1:
        return f"is refused by the workflow in more than a sentence: {said!r}"
    if left := [str(path) for path in folder.rglob("*.parquet")]:
        return f"is refused after work that left {left}"
    return _unclear(case, sentences[0])


def run(n: int, folder: Path, random: Random) -> list[str]:
    """Tries `n` cases, one in twenty by a real start; those accepted, or refused unclearly.

    Raises ValueError for the configuration that all are made from, if it is refused itself.
    """
    if sentence := refusal(text_of(valid()).encode(), folder):
        raise ValueError(f"the valid configuration is refused: {sentence}")
    everything = list(cases())
    chosen = random.sample(everything, min(n, len(everything)))
    found = []
    for number, case in enumerate(chosen):
        problem = _unclear(case, refusal(case.content, folder))
        if problem is None and number % STARTS_ONE_IN == 0:
            problem = _started(case, folder / f"start{number}")
        if problem is not None:
            found.append(f"{case.name} {problem}")
    return found
