"""Tests that SPECIFICATION.md follows from entries and recorded rows, and names what exists."""

import fnmatch
import importlib.util
import pkgutil
import re
from pathlib import Path

import duckdb
import pytest

from tnp.dispatch.registry import catalog
from tnp.gates import GATES, generic_gates
from tnp.model.variants import named_specs
from workflow import specification
from workflow.configuration import read
from workflow.specification import Rows, Thing
from workflow.validation import _rules

JOBS = specification.studies()
THINGS = [thing for things in specification.documents().values() for _, thing in things]
CONFIG = read(Path("config.yaml"))
SHAPES = {job.get("shape") for jobs in specification.plan().jobs.values() for job in jobs.values()}
# Names that a query may compare a column with.
NAMES = {
    "gate": {*GATES, *generic_gates()},
    "op": {*catalog().operators},
    "implementation": {name for op in catalog().operators for name in catalog().names(op)},
    "shape": SHAPES,
    "variant": named_specs().keys() | CONFIG["variants"].keys(),
}


def test_the_page_is_that_of_the_recorded_rows(recorded_database):
    with duckdb.connect(str(recorded_database), read_only=True) as connection:
        page = specification.page(connection)
    assert specification.PAGE.read_text() == page, "SPECIFICATION.md differs: run make report"


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.asked)
def test_an_entry_names_what_exists(thing):
    for place in thing.where:
        program, _, arguments = place.partition(" ")
        if program == "snakemake":
            targets = arguments.removeprefix("--cores 1 ").split()
            assert not {*targets} - JOBS.keys() - _rules(), place
        elif program == "python":
            assert importlib.util.find_spec(arguments.split()[1]), place
        elif program.startswith("tnp."):
            assert pkgutil.resolve_name(place)
        else:
            assert Path(place).exists(), place
    assert not {*thing.gates} - {*GATES, *generic_gates()}
    assert all(fnmatch.filter(JOBS, study) for study in thing.studies)
    for column, known in NAMES.items():
        compared = re.findall(rf"\b{column} (?:!?= '[^']+'|in \([^)]+\))", thing.number)
        assert not {*re.findall(r"'([^']+)'", " ".join(compared))} - known, column
    for start in re.findall(r"starts_with\(shape, '([^']+)'\)", thing.number):
        assert any(shape.startswith(start) for shape in SHAPES if shape), start
    shown = thing.gates or thing.studies or thing.number
    if not thing.where:
        assert not shown, "nothing serves it, yet it shows"
    elif not (shown or thing.lacks):
        assert any(place.startswith("tests/") for place in thing.where), "nothing shows it"


@pytest.fixture
def devices() -> list[Rows]:
    """Returns the rows of each device: a green, a red and a killed gate, and one job of two."""
    connection = duckdb.connect()
    connection.execute("""
        create table gate_status as from (values
            ('green', 5, 0, 0, true), ('green', 7, 0, 0, true), ('green', 2, 0, 2, null),
            ('red', 4, 1, 0, false), ('killed', 3, 0, 1, null)
        ) as gates (gate, n_checks, n_failed, n_skipped, passed);
        create table measurements as
        select
            *,
            coalesce(key, config_id) as comparison_key,
            if(config_id like '%--own', 'own', 'peer') as role,
            if(config_id like 'auto--%', 'auto', 'other') as implementation
        from (values
            ('a--own', true, 'op', 'ok', 'nvidia-h200', null, true),
            ('b', false, 'op', 'oom', 'nvidia-h200', null, true),
            ('b', true, 'op', 'ok', 'nvidia-h100-80gb-hbm3', null, true),
            ('hot', true, 'step', 'ok', 'nvidia-h100-80gb-hbm3', null, true),
            ('large', true, 'step', 'ok', 'nvidia-h100-80gb-hbm3', null, true),
            ('large', false, 'step', 'oom', 'nvidia-h200', null, true),
            ('hot', false, 'step', 'ok', 'nvidia-h200', null, true),
            ('replaced', true, 'step', 'ok', 'nvidia-h200', 'warm', false),
            ('replaced', false, 'step', 'ok', 'nvidia-h200', 'warm', true),
            ('once', true, 'step', 'ok', 'nvidia-h200', 'cold', false),
            ('again', true, 'step', 'ok', 'nvidia-h200', 'cold', true),
            ('hot--own', false, 'op', 'ok', 'nvidia-h200', null, true),
            ('hot--torch', true, 'op', 'ok', 'nvidia-h200', null, true),
            ('old_gpu--own', false, 'op', 'unsupported', 'nvidia-h200', null, true),
            ('old_gpu--torch', true, 'op', 'ok', 'nvidia-h200', null, true),
            ('auto--own', false, 'op', 'ok', 'nvidia-h200', null, true),
            ('auto--torch', true, 'op', 'ok', 'nvidia-h200', null, true)
        ) as jobs (config_id, valid, kind, status, device, key, is_current);
        create table training as select 'run' as config_id, 'nvidia-h200' as device;
    """)
    for view in specification.OF_DEVICE:
        connection.execute(
            f"create view {view} as "
            "from (values ('nvidia-h100-80gb-hbm3'), ('nvidia-h200')) as t (device)"
        )
    jobs = {"study": [{"a", "a--own", "a--torch"}, {"b"}], "run": [{"run"}]}
    jobs |= {"steps": [{"large"}, {"hot"}], "old": [{"replaced"}, {"once"}]}
    jobs["ours"] = [{f"{of}--own", f"{of}--torch"} for of in ("hot", "old_gpu", "auto")]
    gate_status = connection.sql("from gate_status").to_arrow_table()
    return [Rows(connection, jobs, device, gate_status) for device in specification.DEVICES]


@pytest.fixture
def rows(devices) -> Rows:
    """Returns the rows of the first device."""
    return devices[0]


@pytest.mark.parametrize(
    ("entry", "standing"),
    [
        ({}, ("", "missing", "")),
        ({"where": ["here"]}, ("", "works", "")),
        ({"where": ["here"], "note": "Otherwise."}, ("", "works", "Otherwise.")),
        ({"where": ["here"], "lacks": "A form."}, ("", "partly", "A form.")),
        ({"where": ["here"], "gates": ["green"]}, ("`green`: 14 checks, 0 red", "works", "")),
        (
            {"where": ["here"], "gates": ["killed"]},
            ("**`killed`: 3 checks, 0 red, 1 not finished**", "partly", ""),
        ),
        (
            {"where": ["here"], "gates": ["green", "red"]},
            ("**`green`, `red`: 18 checks, 1 red**", "partly", ""),
        ),
        (
            {"where": ["here"], "gates": ["green", "new"]},
            ("**`green`, `new`: 14 checks, 0 red, 1 not run**", "partly", ""),
        ),
        (
            {"where": ["here"], "gates": ["new"], "note": "Otherwise."},
            ("**`new`: not run**", "partly", "Otherwise."),
        ),
        ({"where": ["here"], "studies": ["run"]}, ("`run`: 1 of 1", "works", "")),
        (
            {"where": ["here"], "studies": ["run", "study"]},
            ("**`run`, `study`: 2 of 3**", "partly", ""),
        ),
        (
            {"where": ["here"], "studies": ["stu*"]},
            ("**`stu*`: 1 of 2**", "partly", ""),
        ),
        ({"where": ["here"], "studies": ["steps"]}, ("**`steps`: 1 of 2**", "partly", "")),
        # The current code's row of `replaced` is not valid. That of `once` is another study's.
        ({"where": ["here"], "studies": ["old"]}, ("**`old`: 1 of 2**", "partly", "")),
        # Our row of `hot` is not valid, and PyTorch's does not stand for it.
        ({"where": ["here"], "studies": ["ours"]}, ("**`ours`: 2 of 3**", "partly", "")),
        ({"where": ["here"], "number": "select '2 ×', true"}, ("2 ×", "works", "")),
        ({"where": ["here"], "number": "select '1 ×', false"}, ("**1 ×**", "partly", "")),
        (
            {"where": ["here"], "number": "select null, null"},
            ("**no row**", "partly", ""),
        ),
    ],
)
def test_the_state_follows_from_the_rows(rows, entry, standing):
    assert rows.standing(Thing("it", **entry)) == standing


def test_only_the_part_that_falls_short_is_bold(rows):
    thing = Thing(
        "it", where=["here"], gates=["green"], studies=["stu*"], number="select '2', true"
    )
    assert rows.standing(thing).shown == "`green`: 14 checks, 0 red; **`stu*`: 1 of 2**; 2"


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        ({"studies": ["study"]}, "**`study`: 1 of 2**"),  # a tie
        ({"studies": ["study"],
          "number": "select if(getvariable('device') = 'nvidia-h200', null, '2 ×'), true"},
         "**H100: `study`: 1 of 2**; 2 ×"),
        ({"studies": ["run"]}, "`run`: 1 of 1"),
        ({"studies": ["steps"], "number": "select getvariable('device'), true"},
         "H100: `steps`: 2 of 2; nvidia-h100-80gb-hbm3"),
        ({"number": "select getvariable('device'), true"}, "nvidia-h200"),
        ({"number": "select if(getvariable('device') = 'nvidia-h200', null, '2 ×'), true"},
         "H100: 2 ×"),
        ({"number": "select null, null"}, "**no row**"),
    ],
)  # fmt: skip
def test_a_thing_stands_on_the_device_with_more_of_its_jobs(devices, entry, shown):
    thing = Thing("it", where=["here"], **entry)
    assert specification.shown_device(thing, devices).standing(thing).shown == shown


def test_a_study_that_does_not_exist_is_refused(rows):
    with pytest.raises(ValueError, match="names 'stdy': config.yaml has no study"):
        rows.standing(Thing("it", where=["here"], studies=["stdy"]))


def test_a_number_is_of_one_device_unless_it_asks_for_every(rows):
    for table, n_rows in {"speedup": 1, "roofline": 1, "speedup_of_every_gpu": 2}.items():
        thing = Thing("it", where=["here"], number=f"select count(*)::text, true from {table}")
        assert rows.standing(thing).shown == str(n_rows), table


def test_a_gate_that_has_not_run_is_of_its_phase(rows):
    query = "select list(gate) from gates_of_phases"
    (gates,) = rows.connection.execute(query).fetchone()
    assert {"baseline", "tolerances"} <= {*gates} and "op--swiglu--triton" not in gates
