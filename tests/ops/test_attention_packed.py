"""Tests that each packed sequence is alone, whatever stands beside it."""

import pytest
import torch

from tests.ops.attention_kinds import HEAD_DIM, NAMES, assert_close, cu_seqlens, draw, ours, run
from tests.ops.problems import DEVICE, HERE
from tnp.dispatch import selection
from tnp.ops.attention import OPERATOR, keys
from tnp.ops.attention.torch_forms import longest_sequence

LENGTHS, KEY_LENGTHS = (5, 0, 17, 28), (9, 3, 0, 38)
KINDS = ({}, {"causal": True}, {"window": 9}, {"causal": True, "window": 9})


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on CUDA other functions of PyTorch do it")
def test_flash_on_the_cpu_takes_packed_sequences():
    inputs = draw(20, 33)
    asked = {"cu_seqlens_q": cu_seqlens((5, 0, 15)), "cu_seqlens_k": cu_seqlens((3, 9, 21))}
    for kind in ({}, {"causal": True}):
        expected = run(inputs, implementation="reference", **asked, **kind)
        assert_close(run(inputs, implementation="sdpa_flash", **asked, **kind), expected)


def of_sequence(x: torch.Tensor, cu: torch.Tensor, s: int) -> torch.Tensor:
    return x[:, :, cu[s] : cu[s + 1]]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packed_sequences_are_each_alone(kind):
    """Some have no queries, some no keys; heads are grouped. The gate compares ours with this."""
    inputs = draw(sum(LENGTHS), sum(KEY_LENGTHS), heads=(2, 1))
    cu_q, cu_k = cu_seqlens(LENGTHS), cu_seqlens(KEY_LENGTHS)
    asked = {"implementation": "reference"} | kind
    found = run(inputs, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **asked)
    sides = {"o": cu_q, "dq": cu_q, "dk": cu_k, "dv": cu_k}
    for s in range(len(LENGTHS)):
        of_this = {name: of_sequence(x, sides[name], s) for name, x in found.items()}
        alone = [
            of_sequence(x, cu, s) for x, cu in zip(inputs, (cu_q, cu_k, cu_k, cu_q), strict=True)
        ]  # fmt: skip
        if LENGTHS[s] and KEY_LENGTHS[s]:
            assert_close(of_this, run(alone, **asked))
        else:
            assert all((x == 0).all() for x in of_this.values())


def test_packed_sequences_are_each_alone_bit_by_bit_where_tiles_agree():
    """A sequence's tiles begin with it, and the separate backward pass adds in one order."""
    inputs, cu = draw(), cu_seqlens(LENGTHS)
    asked = {"implementation": "separate", "causal": True}
    found = run(inputs, cu_seqlens_q=cu, cu_seqlens_k=cu, **asked)
    for s in (0, 2, 3):
        alone = run([of_sequence(x, cu, s) for x in inputs], **asked)
        for name, x in alone.items():
            assert torch.equal(of_sequence(found[name], cu, s), x), name


@ours
@pytest.mark.parametrize("kind", KINDS[::3], ids=str)
def test_a_sequence_sees_nothing_of_another(implementation, kind):
    """Sees not even values of another sequence that are not finite."""
    inputs, cu = draw(), cu_seqlens(LENGTHS)
    asked = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "implementation": implementation} | kind
    before = run(inputs, **asked)
    for x in inputs:
        of_sequence(x, cu, 2)[:] = float("nan")
    after = run(inputs, **asked)
    for s in (0, 3):
        for name in NAMES:
            pair = (of_sequence(x[name], cu, s) for x in (before, after))
            assert torch.equal(*pair), name


@ours
def test_no_queries_of_packed_sequences(implementation):
    inputs = draw(0, 8)
    cu = {"cu_seqlens_q": cu_seqlens([0, 0]), "cu_seqlens_k": cu_seqlens([3, 5])}
    found = run(inputs, implementation=implementation, **cu)
    assert found["o"].shape == inputs[0].shape and (found["dk"] == 0).all()


@pytest.mark.parametrize("side", ["n_q", "n_k"])
def test_the_table_of_tiles(side):
    """The table has each tile's sequence and first row there. Shallow tiles come first.

    There are more sequences than a program reads at a time. Some are empty, one is a whole tile,
    and one is longer than a program writes at a time.
    """
    lengths = [3, 0, 16, *[0] * 127, 5, 40, 0, 1, 1100]
    x, cu = torch.zeros(1, 1, sum(lengths), HEAD_DIM, device=DEVICE), cu_seqlens(lengths)
    inputs = x, x, x, None, cu, cu
    tiles = keys.Tiles(selection.describe(OPERATOR, inputs, (), (), HERE), side, 16)
    table, *used, n_keys = tiles.pointers(inputs[3:], x)
    table = table[: 2 * tiles.n].view(-1, 2).tolist()
    assert all(torch.equal(one[: len(cu)], cu) for one in used) and n_keys[0] == sum(lengths)
    every = [[s, row] for s, n in enumerate(lengths) for row in range(0, n, 16)]
    behind = {s: (n - 1) // 16 * 16 for s, n in enumerate(lengths)}
    shortest_first = sorted(every, key=lambda tile: tile[1])
    longest_first = sorted(every, key=lambda tile: tile[1] - behind[tile[0]])
    expected = shortest_first if side == "n_q" else longest_first
    assert table[: len(expected)] == expected
    assert table[len(expected) :] == [[-1, 0]] * (tiles.n - len(expected))


def test_the_longest_sequence_is_that_of_the_tensor_as_it_stands():
    """A tensor of inference mode and a replayed graph count no changes."""
    for inference in (False, True):
        with torch.inference_mode(inference):
            cu = cu_seqlens([3, 9, 2])
            assert (longest(cu), longest(cu)) == (9, 9)
            cu.data[2] = 4
            assert longest(cu) == 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_graph_is_captured_for_the_lengths_of_the_call_before():
    cu, graph = cu_seqlens([3, 9, 2]).cuda(), torch.cuda.CUDAGraph()
    refused = pytest.raises(RuntimeError, match="make the same call once before")
    with refused, torch.cuda.graph(graph):
        longest(cu)
    assert longest(cu) == 9
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert longest(cu) == 9
        cu[2] = 4
    version = cu._version
    assert longest(cu) == 9  # nothing has run yet
    graph.replay()
    assert cu._version == version and longest(cu) == 10


def longest(cu, n_rows=14):
    return longest_sequence(cu, "cu_seqlens_k", "k", n_rows)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "ends, sentence",
    [
        ([1, 4, 8], "begins with 1: it must begin with 0"),
        ([0, 5, 3, 8], "goes from 5 to 3 at place 2: it must not decrease"),
        ([0, 4, 9], "ends with 9 and k has 8 rows: they must be equal"),
    ],
)
def test_asking_the_device_for_the_longest_refuses_wrong_lengths(ends, sentence, inference):
    """It refuses each time, and asks the device once where all is well."""
    with torch.inference_mode(inference):
        cu = torch.tensor(ends, dtype=torch.int32)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"cu_seqlens_k {sentence}"):
                longest(cu, 8)
        right = cu_seqlens([2, 1, 5])
        assert longest(right, 8) == 5
        with pytest.raises(ValueError, match="ends with 8 and k has 7 rows"):
            longest(right, 7)
