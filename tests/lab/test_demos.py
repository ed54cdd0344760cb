"""Tests that demos of CuTe run on this CPU, and that the facts they print are true."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

import pytest

from tnp_lab import nvrtc
from tnp_lab.demos import __main__ as demos

runs = pytest.mark.skipif(demos.missing() is not None, reason=f"no demo runs: {demos.missing()}")
LANES = range(32)


@cache
def printed(name: str) -> str:
    return demos.run(name)


def table(text: str, after: str) -> list[list[int]]:
    """Returns the rows of numbers below the line that starts with `after`."""
    below = re.search(rf"^{re.escape(after)}.*\n((?:.*\d\n)+)", text, re.MULTILINE)[1]
    rows = [re.sub(r"row +\d+:", "", line) for line in below.splitlines() if "turns" not in line]
    return [[int(number) for number in re.findall(r"\d+", row)] for row in rows]


@runs
def test_layouts_are_functions_that_compose():
    text = printed("layouts")
    keys = table(text, "keys = (_4,_3):(_3,_1)")
    assert keys == [[3 * i + j for j in range(3)] for i in range(4)]
    assert "keys(5) = keys(5 % 4, 5 / 4) = 4" in text and keys[5 % 4][5 // 4] == 4
    swap = table(text, "swap = (_3,_4):(_4,_1)")
    composed = table(text, "composition(keys, swap)")
    assert composed == [[keys[at % 4][at // 4] for at in row] for row in swap]
    assert composed == [list(column) for column in zip(*keys, strict=True)]
    # Numbers 0 and 1 of an instruction lie in its first row, 2 and 3 in the row 8 below.
    registers = {
        (2 * m + row, 2 * n + column): 8 * n + 4 * m + 2 * row + column
        for m in range(2) for n in range(2) for row in range(2) for column in range(2)
    }  # fmt: skip
    regrouped = table(text, "as_rows(scores)")
    assert regrouped == [[registers[i, j] for j in range(4)] for i in range(4)]


@runs
def test_a_tiled_copy_gives_each_thread_its_pieces():
    text = printed("copies")
    rows = re.findall(r"^row +(\d+):(.*)$", text, re.MULTILINE)
    assert len(rows) == 6
    for row, threads in rows:
        assert threads.split() == [str(int(row) % 16 * 8 + piece) for piece in range(8)]
    assert "1024 of 1024 pieces of 16 bytes are copied exactly once" in text
    copied = re.findall(r"\((\d+), (\d+)\)", text.partition("Thread 37 copies")[2])
    assert [(int(row), int(column)) for row, column in copied] == [
        (37 // 8 + 16 * step, 37 % 8 * 8) for step in range(8)
    ]
    along_rows, along_columns = {i // 8 for i in LANES}, {i % 16 for i in LANES}
    expected = f"{len(along_rows)} as in cute.cu, {len(along_columns)} with threads along a column"
    assert expected in text


def groups(kind: str, head_dim: int) -> list[list[int]]:
    """Returns the group of 4 banks of each 16 bytes of 64 rows, from the rule of each kind."""
    pieces = head_dim // 8
    across = pieces + (kind == "padded")

    def place(row: int, piece: int) -> int:
        # 128 bytes of rows, one or two, share the number that pieces are XORed with.
        swizzled = piece ^ (row * pieces // 8) % pieces if kind == "swizzled" else piece
        return row * across + swizzled

    return [[place(row, piece) % 8 for piece in range(pieces)] for row in range(64)]


def turns(accesses: Iterable[Sequence[int]]) -> int:
    """Returns how many of 8 accesses at once lie in one group, at most."""
    return max(max(Counter(access).values()) for access in accesses)


@runs
def test_bank_conflicts_are_counted():
    text = printed("swizzle")
    for head_dim in (64, 32):
        for kind in ("plain", "padded", "swizzled"):
            title, found = f"{kind}, D = {head_dim}", groups(kind, head_dim)
            assert table(text, title) == found[:8]
            flat = sum(found, [])
            reads = zip(*found[:8], strict=True)
            writes = [flat[first : first + 8] for first in range(0, 64, 8)]
            read, write = turns(reads), turns(writes)
            own = text.partition(title)[2].partition("\n\n")[0]
            assert f"turns: read {read}, write {write};" in own, title
            assert (read > 1) == (kind == "plain"), title


@runs
def test_two_idioms_change_little():
    text = printed("idioms")
    fragments = re.findall(
        r"^D = (\d+): (\d+) and (\d+) numbers, (.*)\n  (.*)\n  (.*)$", text, re.MULTILINE
    )
    assert [fragment[0] for fragment in fragments] == ["64", "128", "32"]
    for head_dim, with_swizzle, without, order, *layouts in fragments:
        # A warp multiplies by all values of a tile, so a lane holds a 32nd of them.
        keys = 64 if head_dim != "128" else 32
        assert int(with_swizzle) == int(without) == keys * int(head_dim) // 32
        for layout in layouts:  # no number shares a register with another
            shape, stride = ([int(n) for n in re.findall(r"_(\d+)", x)] for x in layout.split(":"))
            places = {
                sum(i * s for i, s in zip(at, stride, strict=True))
                for at in itertools.product(*map(range, shape))
            }
            assert places == {*range(int(without))}
        assert order == ("the same order" if layouts[0] == layouts[1] else "two orders")
    assert [fragment[3] for fragment in fragments] == ["the same order"] * 2 + ["two orders"]
    for bits in range(4):  # rows of 64 bytes: a bit of the place, from 128 bytes on, for each bit
        rows = [(4 * row ^ (row // 2) % 2**bits) % 8 for row in range(8)]
        assert f"{bits} bits: {turns([rows])} turns" in text


def held(text: str, title: str) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns row and column of each lane's numbers, {(lane, number): (row, column)}."""
    rows = re.findall(r"^row +\d+:(.*)$", text.partition(title)[2].partition("\n\n")[0], re.M)
    return {
        tuple(map(int, cell.split("."))): (i, j)
        for i, row in enumerate(rows)
        for j, cell in enumerate(row.split())
    }


@runs
def test_lanes_hold_what_the_manual_of_ptx_says():
    """Formulas of section "Matrix Fragments for mma.m16n8k16" with .f16, of c_i and of a_i."""
    text = printed("registers")
    result = {
        (lane, i): (lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1))
        for lane in LANES for i in range(4)
    }  # fmt: skip
    operand = {
        (lane, i): (
            lane // 4 + (0 if 0 <= i < 2 or 4 <= i < 6 else 8),
            lane % 4 * 2 + (i & 1) + (8 if i >= 4 else 0),
        )
        for lane in LANES for i in range(8)
    }  # fmt: skip
    assert held(text, "result, 16 x 8") == result
    assert held(text, "left operand, 16 x 16") == operand
    # The second result, 8 columns further, has the operand's numbers 4 to 7.
    for (lane, i), (row, column) in operand.items():
        assert result[lane, i % 4] == (row, column - i // 4 * 8)
    assert "8192 of 8192 scores" in text


@runs
def test_four_lanes_find_a_rows_maximum_and_sum():
    lines = re.findall(r"^ +\d+ +\d+ .*\.\.\..*$", printed("softmax"), re.MULTILINE)
    assert len(lines) == 12
    for lane, line in enumerate(lines):
        row = lane // 4
        x = [4 * math.sin(7 * row + key) for key in range(64)]
        own = [key for key in range(64) if key % 8 // 2 == lane % 4]
        place, numbers = line.split("...")
        assert [int(n) for n in re.findall(r"\d+", place)] == [lane, row, *own[:3]]
        top = max(x)
        sums = [sum(2 ** (x[key] - top) for key in keys) for keys in (own, range(64))]
        found = [float(number) for number in numbers.split()]
        # sinf errs by a unit in the last place, 2^-24, and x by 4 times that. Digits end at 1e-7.
        unit, digits = 2.0**-24, 5e-8
        expected = pytest.approx([max(x[key] for key in own), top], abs=4 * unit + digits)
        assert found[:2] == expected
        # An exponent errs by twice x's error and its own rounding, 4 units. A power errs by a unit
        # in the last place, 2 units of 1, and a sum by one of 64 roundings each.
        relative = (12 * math.log(2) + 2 + 64) * unit
        assert found[2:] == pytest.approx(sums, rel=relative, abs=digits)


def test_without_a_name_the_demos_are_listed(capsys):
    assert demos.main([]) == 0
    listed = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in listed] == [*demos.DEMOS]
    assert all(line.endswith(".") for line in listed)


def test_what_is_missing_is_named(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(demos.shutil, "which", lambda name: None)
        assert demos.main(["swizzle"]) == 1
        assert capsys.readouterr().err.startswith("g++, which compiles the demos, is not here")
    monkeypatch.setattr(demos.shutil, "which", lambda name: name)
    monkeypatch.setattr(nvrtc, "cutlass", lambda: None)
    assert demos.main(["swizzle"]) == 1
    assert "run pip install './lab[demos]'" in capsys.readouterr().err


@runs
def test_a_fault_in_a_demo_ends_in_the_compilers_message(monkeypatch, tmp_path):
    (tmp_path / "wrong.cpp").write_text("int main() { return nothing; }")
    monkeypatch.setitem(demos.DEMOS, "wrong", tmp_path / "wrong.cpp")
    with pytest.raises(nvrtc.CompilationError, match="(?s)wrong.cpp does not compile: .*nothing"):
        demos.run("wrong")
