"""Reads configuration files ahead of Snakemake: refuses what it would let pass, remembers lines.

Snakemake reads and merges `config.yaml`, the files of `--configfile` and the values of `--config`.
It takes the later of two equal keys without a word, and it tells neither the line of a mistake in
YAML nor where a value was written.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from workflow.faults import Fault, Place, sentence, shown

# Aliases of aliases can make a short file expand without end.
MAX_VALUES = 100_000


def places(
    default: str, files: Iterable[os.PathLike | str], overrides: Mapping[str, object]
) -> dict[Place, str]:
    """Returns where each value of the merged configuration was written: "config.yaml, line 37".

    Args:
        default: the file that is read first, unless it is missing and `files` stand in its place.
        files: the files of --configfile in the order given. A later file overrides an earlier one.
        overrides: the values of --config, which override all files.

    Raises:
        ValueError: a file is missing, YAML cannot read it, or a key stands in it twice.
    """
    files = [_shown(file) for file in files]
    if not files or Path(default).exists():
        files.insert(0, default)
    found: dict[Place, str] = {}
    for file in files:
        found |= {place: f"{file}, line {line}" for place, line in lines(file).items()}
    return found | dict.fromkeys(_inside(overrides), "--config")


def lines(file: str) -> dict[Place, int]:
    """Returns the line of each value of a YAML file. If a value has a key, it is the key's line."""
    text = _text(file)
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise ValueError(
                f"{file}: it must hold keys with values, such as 'device: auto', not "
                f"{'a list or a single value' if root else 'nothing'}"
            )
        found = {}
        for place, line in _walk(loader, root, ()):
            found[place] = line
            if len(found) > MAX_VALUES:
                raise ValueError(f"{file}: its aliases stand for more than {MAX_VALUES:,} values")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(
            f"{file}, line {line}: character {text[error.position]!r} may not stand in YAML"
        ) from None
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{file}, {_sentence(error)}") from None
    except RecursionError:
        raise ValueError(f"{file}: its values are nested too deeply") from None
    return found


class _Loader(yaml.SafeLoader):
    """Loads YAML, and refuses double keys, keys that are not text, tags, and unreadable scalars."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        _check_tag(node, self.DEFAULT_MAPPING_TAG)
        first: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if key.tag not in (self.DEFAULT_SCALAR_TAG, "tag:yaml.org,2002:merge"):
                what = f"key {key.value!r}" if isinstance(key, yaml.ScalarNode) else "this key"
                raise _refused(key, f"{what} is no text to YAML: write it in quotes")
            if key.value in first:
                line = first[key.value].line + 1
                raise _refused(key, f"key {key.value!r} stands already in line {line}")
            first[key.value] = key.start_mark
        return node

    def compose_sequence_node(self, anchor: str | None) -> yaml.SequenceNode:
        node = super().compose_sequence_node(anchor)
        _check_tag(node, self.DEFAULT_SEQUENCE_TAG)
        return node

    def compose_scalar_node(self, anchor: str | None) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        try:
            if node.tag not in ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"):
                self.construct_object(node)
        except (ValueError, KeyError) as error:  # a date in a thirteenth month, !!int of a word
            raise _refused(
                node, f"{node.value[:40]!r} cannot be read: {str(error).split(';')[0]}"
            ) from None
        return node


def _walk(
    loader: _Loader, node: yaml.Node, place: Place, above: tuple[yaml.Node, ...] = ()
) -> Iterator[tuple[Place, int]]:
    """Yields (place, line) of everything inside `node`."""
    if any(node is other for other in above):
        raise _refused(node, "what this anchor names contains itself")
    above += (node,)
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)  # what `<<` takes over comes first, own keys go before it
        for key, value in node.value:
            yield (*place, key.value), key.start_mark.line + 1
            yield from _walk(loader, value, (*place, key.value), above)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*place, index), value.start_mark.line + 1
            yield from _walk(loader, value, (*place, index), above)


def _check_tag(node: yaml.Node, plain: str) -> None:
    if node.tag != plain:
        raise _refused(node, f"tag {node.tag!r} is not for a configuration: leave it out")


def _refused(node: yaml.Node, what: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


def _sentence(error: yaml.MarkedYAMLError) -> str:
    """Returns "line 12: …" and where it began: YAML misses a quote at the end of the file."""
    line = (error.problem_mark or error.context_mark).line + 1
    hint = "; indent with spaces, not with tabs" if r"'\t'" in error.problem else ""
    if error.context is None:
        return f"line {line}: {error.problem}{hint}"
    begin = f" (line {error.context_mark.line + 1})" if error.context_mark else ""
    return f"line {line}: {error.context}{begin}: {error.problem}{hint}"


def _text(file: str) -> str:
    path = Path(file)
    if not path.exists():
        raise ValueError(f"{file}: there is no such file in {Path.cwd()}")
    if not path.is_file():
        raise ValueError(f"{file} is not a file: name a YAML file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{file}, line {line}: byte {content[error.start]:#04x} is not UTF-8: save the file "
            "as UTF-8"
        ) from None


def _inside(value: object, place: Place = ()) -> Iterator[Place]:
    """Yields the places of everything inside `value`."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, inner in items:
        yield (*place, key)
        if isinstance(inner, Mapping | list):
            yield from _inside(inner, (*place, key))


def _shown(file: os.PathLike | str) -> str:
    """Returns `file` as a user would write it: Snakemake has made it absolute."""
    relative = os.path.relpath(file)
    return os.fspath(file) if relative.startswith(os.pardir) else relative


def read(file: os.PathLike | str) -> dict[str, Any]:
    """Returns what a configuration file says, with its grids written out."""
    return expanded(yaml.safe_load(Path(file).read_text()), {})[0]


def expanded(
    config: Mapping[str, Any], written: Mapping[Place, str]
) -> tuple[dict[str, Any], dict[Place, str]]:
    """Returns `config` with its grids written out, and where each of its values was written.

    An entry whose name has braces is a grid. It becomes one entry for each combination of the
    values in its lists: "l{n_k}_d{head_dim}: {n_k: [512, 1024], head_dim: [64, 128]}" are four.
    "{n_k:k}" writes 1024 as "1k". A key of several sizes gives them together, as in
    "n_q,n_k: [[150, 100], [300, 256]]". Several grids of one name stand in a list. An entry that is
    written by itself overrides the grid's entry of the same name, key by key. Text in a list stands
    for each word in its braces: "llama/decode_{1k,8k}" are two.

    Raises:
        ValueError: a grid that cannot be written out.
    """
    found = dict(written)
    try:
        return _expanded(config, (), found), found
    except _GridError as error:
        raise ValueError(sentence(error.args[0], written)) from None


class _GridError(Exception):
    """Holds what is wrong with a grid, a `Fault`."""


_BRACES = re.compile(r"\{([^{}]*)\}")


def _expanded(value: Any, place: Place, written: dict[Place, str]) -> Any:
    if isinstance(value, list):
        words = [(at, word) for at, item in enumerate(value) for word in _words(item)]
        if len(words) > len(value):
            lines = {at: written.get((*place, at)) for at in range(len(value))}
            written |= {(*place, new): lines[at] for new, (at, _) in enumerate(words) if lines[at]}
        return [_expanded(word, (*place, new), written) for new, (_, word) in enumerate(words)]
    if not isinstance(value, Mapping):
        return value
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if not _BRACES.search(str(key)):
            found.setdefault(key, inner)
            continue
        grids = inner if isinstance(inner, list) else [inner]
        for at, grid in enumerate(grids):
            old = (*place, key, at) if isinstance(inner, list) else (*place, key)
            for name, entry in _grid(key, grid, old):
                if name in found and name not in value:
                    raise _GridError(Fault(place, f"{name!r} is in two grids", (key,)))
                own = value.get(name, {})
                found[name] = entry | own if isinstance(own, Mapping) else own
                _copy(old, (*place, name), written)
    return {key: _expanded(inner, (*place, key), written) for key, inner in found.items()}


def _grid(name: str, sizes: object, place: Place) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, sizes) of each entry of a grid."""
    if not isinstance(sizes, Mapping):
        what = f"{shown(sizes)} must be keys with values: braces in its name make it a grid"
        raise _GridError(Fault(place, what))
    named = [part.partition(":")[0] for part in _BRACES.findall(name)]
    axes = []
    for key, value in sizes.items():
        keys = key.split(",")
        values = value if len(keys) > 1 or key in named and isinstance(value, list) else [value]
        rows = [[one] for one in values] if len(keys) == 1 else values
        if not isinstance(rows, list) or not all(
            isinstance(row, list) and len(row) == len(keys) for row in rows
        ):
            what = f"{shown(value)} must be a list of lists of {len(keys)}"
            raise _GridError(Fault((*place, key), what))
        axes.append([dict(zip(keys, row, strict=True)) for row in rows])
    for combination in product(*axes):
        entry = {key: value for part in combination for key, value in part.items()}
        missing = [key for key in named if key not in entry]
        if missing:
            what = f"key {missing[0]!r} is missing, which stands in braces in its name"
            raise _GridError(Fault(place, what))
        texts = [_text_of(part, entry) for part in _BRACES.findall(name)]
        yield _BRACES.sub("{}", name).format(*texts), entry


def _text_of(part: str, entry: Mapping[str, Any]) -> str:
    key, _, unit = part.partition(":")
    value = entry[key]
    whole = unit == "k" and isinstance(value, int) and value % 1024 == 0
    return f"{value // 1024}k" if whole else str(value)


def _words(item: object) -> list:
    """Returns all that text with braces stands for: "a{b,c}" are "ab" and "ac"."""
    if not isinstance(item, str):
        return [item]
    parts = _BRACES.split(item)
    choices = [part.split(",") if at % 2 else [part] for at, part in enumerate(parts)]
    return ["".join(words) for words in product(*choices)]


def _copy(old: Place, new: Place, written: dict[Place, str]) -> None:
    """Notes that what is at `new` was written at `old`, unless it was written by itself."""
    inside = [place for place in written if place[: len(old)] == old]
    for place in inside:
        written.setdefault(new + place[len(old) :], written[place])


def check_command_line(arguments: list[str]) -> None:
    """Ends the process with a sentence if a file of --configfile cannot be read, or if a target
    stands behind --config.

    The profiles call it: Snakemake reads both ahead of the Snakefile, and ends in a traceback.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--configfile", "--configfiles", nargs="+", default=[])
    parser.add_argument("--config", "-C", nargs="*", default=[])
    given = parser.parse_known_args(arguments)[0]
    for text in given.config:
        if "=" not in text:
            sys.exit(
                f"{text!r} stands behind --config, which takes all that follows for settings such "
                "as device=cpu: write targets first"
            )
    for file in given.configfile:
        try:
            lines(file)
        except ValueError as error:
            sys.exit(str(error))
