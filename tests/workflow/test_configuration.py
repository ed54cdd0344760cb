"""Text that YAML cannot read, or reads otherwise than it looks, is refused with its line."""

import os
import re

import pytest
import yaml

from workflow.configuration import check_command_line, expanded, lines, places, read

EXPANDING = ["a: &a [0, 0, 0, 0, 0, 0, 0, 0, 0]"] + [
    f"{name}: &{name} [{', '.join([f'*{last}'] * 9)}]"
    for last, name in zip("abcde", "bcdef", strict=True)
]


@pytest.mark.parametrize(
    "text, line, sentence",
    [
        ("a:\n\tb: 1", 2, "found character '\\t' that cannot start any token; indent with spaces"),
        ("a:\n  b: 1\n c: 2", 3, "expected <block end>"),
        ("a: 'x\nb: 2\n", 3, "while scanning a quoted scalar (line 1): found unexpected end"),
        ('a: 1\nb: "x\nc: 2\n', 4, "while scanning a quoted scalar (line 2)"),
        ("a: [1, 2\nb: 3", 2, "while parsing a flow sequence (line 1): expected ',' or ']'"),
        ("a: {b: 1\nc: 2", 2, "while parsing a flow mapping (line 1): expected ',' or '}'"),
        ("a: 1\nb: *x", 2, "found undefined alias 'x'"),
        ("a: b: c", 1, "mapping values are not allowed here"),
        ("a: 1\nbc\nd: 2", 3, "could not find expected ':'"),
        ("a: - b", 1, "sequence entries are not allowed here"),
        ("a:\n  - b\n  c: 1", 3, "expected <block end>"),
        ("a: 1\nb: @x", 2, "found character '@' that cannot start any token"),
        ("a: 1\n---\nb: 1", 2, "expected a single document"),
        ("a: &x 1\nb: &x 2\nc: *x", 2, "found duplicate anchor 'x'"),
        ("a: 1\nb: !own 2", 2, "could not determine a constructor for the tag '!own'"),
        ("a: !!set {b}", 1, "tag 'tag:yaml.org,2002:set' is not for a configuration"),
        ("a: !!python/tuple [1]", 1, "python/tuple' is not for a configuration"),
        ("a: 2001-13-45", 1, "'2001-13-45' cannot be read: month must be in 1..12"),
        (f"a: {'9' * 5000}", 1, "cannot be read: Exceeds the limit"),
        ("a: 1\nb: \x01", 2, "character '\\x01' may not stand in YAML"),
        ("a:\n  <<: 3", 2, "expected a mapping or list of mappings for merging"),
        # YAML alone would accept these.
        ("a: 1\nb:\n  c: 1\n  d: 1\n  c: 2", 5, "key 'c' stands already in line 3"),
        ("a: 1\nb: 2\na: 3", 3, "key 'a' stands already in line 1"),
        ("a: {b: 1, b: 1}", 1, "key 'b' stands already in line 1"),
        ("a: &a\n  b: *a", 1, "what this anchor names contains itself"),
        ("a: &a [1, [*a]]", 1, "what this anchor names contains itself"),
        ("a:\n  on: 1", 2, "key 'on' is no text to YAML: write it in quotes"),
        ("a: 1\n2: 1", 2, "key '2' is no text to YAML"),
        ("[a, b]: 1", 1, "this key is no text to YAML"),
        ("", None, "it must hold keys with values, such as 'device: auto', not nothing"),
        ("- a", None, "it must hold keys with values"),
        ("a: " + "[" * 5000, None, "its values are nested too deeply"),
        ("\n".join(EXPANDING), None, "its aliases stand for more than 100,000 values"),
    ],
)
def test_refusals(text, line, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        lines("own.yaml")
    place = "own.yaml" if line is None else f"own.yaml, line {line}"
    assert str(error.value).startswith(f"{place}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("a: 1\n".encode("utf-16"), "own.yaml, line 1: byte 0xff is not UTF-8"),
        ("a: 1\nb: é\n".encode("latin-1"), "own.yaml, line 2: byte 0xe9 is not UTF-8"),
        ("a: 1\n".encode("utf-16-le"), "own.yaml, line 1: character '\\x00' may not stand"),
    ],
)
def test_other_encodings_are_refused(content, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        lines("own.yaml")


def test_what_is_no_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"config.yaml: there is no such file in {tmp_path}"):
        places("config.yaml", [], {})
    with pytest.raises(ValueError, match="other.yaml: there is no such file"):
        places("config.yaml", [tmp_path / "other.yaml"], {})
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # to be read, it would wait for ever
    for name in ("folder", "pipe"):
        with pytest.raises(ValueError, match=f"{name} is not a file"):
            lines(name)


def test_lines_of_keys_items_and_what_is_merged(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "a: &a\n  b: 1\n  c:\n    - 1\n    - x: 2\nd:\n  <<: *a\n  b: 2\ne: *a\nf: [1,\n 2]\n"
    )
    found = {".".join(map(str, place)): line for place, line in lines(str(file)).items()}
    inside_a = {"b": 2, "c": 3, "c.0": 4, "c.1": 5, "c.1.x": 5}
    assert found == {
        "a": 1,
        **{f"a.{key}": line for key, line in inside_a.items()},
        "d": 6,
        **{f"d.{key}": line for key, line in (inside_a | {"b": 8}).items()},
        "e": 9,
        **{f"e.{key}": line for key, line in inside_a.items()},
        "f": 10,
        "f.0": 10,
        "f.1": 11,
    }


def test_json_has_lines_too(tmp_path):
    (tmp_path / "own.json").write_text('{"a": {\n"b": 1,\n"c": [2]}}')
    assert lines(str(tmp_path / "own.json"))["a", "c", 0] == 3


def test_other_files_may_stand_in_place_of_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.yaml").write_text("a: 1\n")
    assert places("config.yaml", [tmp_path / "other.yaml"], {"b": {"c": [1]}}) == {
        ("a",): "other.yaml, line 1",
        ("b",): "--config",
        ("b", "c"): "--config",
        ("b", "c", 0): "--config",
    }


GRIDS = """
runs:
  b{batch}_{n:k}: { batch: [1, 2], n: [512, 2048], same: 3 }
  b1_512: { batch: 7 }
  none: { n: [4, 5] }
sizes: [ { "q{q}": { "q,k": [[1, 2], [3, 4]] } }, { "w{w}": [{ w: 1 }, { w: [2, 3] }] } ]
at: ["l/{a,b}_{1k,2k}", plain, "x{y}"]
"""


def test_a_grid_is_the_product_of_what_its_name_has_in_braces(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(GRIDS)
    assert read("own.yaml") == {
        "runs": {
            "b1_512": {"batch": 7, "n": 512, "same": 3},  # its own word goes before the grid's
            "b1_2k": {"batch": 1, "n": 2048, "same": 3},
            "b2_512": {"batch": 2, "n": 512, "same": 3},
            "b2_2k": {"batch": 2, "n": 2048, "same": 3},
            "none": {"n": [4, 5]},
        },
        "sizes": [
            {"q1": {"q": 1, "k": 2}, "q3": {"q": 3, "k": 4}},
            {"w1": {"w": 1}, "w2": {"w": 2}, "w3": {"w": 3}},
        ],
        "at": ["l/a_1k", "l/a_2k", "l/b_1k", "l/b_2k", "plain", "xy"],
    }
    written = expanded(yaml.safe_load(GRIDS), places("own.yaml", [], {}))[1]
    lines_of = {"runs.b2_2k.n": 3, "runs.b1_512.batch": 4, "runs.b1_512.n": 3, "at.4": 7}
    for place, line in lines_of.items():
        parts = tuple(int(part) if part.isdigit() else part for part in place.split("."))
        assert written[parts] == f"own.yaml, line {line}", place


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("a: { 'b{n}': 3 }", "a.b{n}: 3 must be keys with values: braces in its name make it a"),
        ("a: { 'b{n}': { m: [1] } }", "a.b{n}: key 'n' is missing, which stands in braces in its"),
        ("a: { 'b{n}': { 'n,m': [1, 2] } }", "a.b{n}.n,m: [1, 2] must be a list of lists of 2"),
        ("a: { 'b{n}': { 'n,m': 4 } }", "a.b{n}.n,m: 4 must be a list of lists of 2"),
        ("a: { 'b{n}': { n: [1, 1] } }", "a: 'b1' is in two grids"),
    ],
)
def test_a_grid_that_cannot_be_written_out_is_one_sentence(text, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"own.yaml, line 1: {sentence}")):
        expanded(yaml.safe_load(text), places("own.yaml", [], {}))


def test_a_target_behind_config_is_one_sentence(capsys):
    with pytest.raises(SystemExit, match="'cpu' stands behind --config, which takes all"):
        check_command_line(["--config", "device=cpu", "cpu"])
    with pytest.raises(SystemExit, match="nowhere.yaml: there is no such file in "):
        check_command_line(["-q", "--configfile=nowhere.yaml"])
    check_command_line(["cpu", "--config", "device=cpu", "again=x"])
