"""Tests decode attention: how work is shared, what is read, pages.

The gate compares numbers with float64.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.ops.launched import reads, recorded
from tnp.dispatch import devices, plans
from tnp.dispatch.devices import Target
from tnp.ops.decode_attention import OPERATOR, decode_attention, definition, torch_forms
from tnp.ops.decode_attention.triton_decode import Config, configs

FORWARD = "decode_attention.forward"
SCALE = 0.25
SMALL = Config(16, 1, 4, 2)  # blocks of 16 keys, a program a multiprocessor


def draw(lengths, kv_heads=2, group=2, n_queries=1, n_keys=96, head_dim=16, page=None, seed=0):
    """Returns q, k, v, lengths and a page table, which is None without `page`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).transpose(1, 2)

    batch, table = len(lengths), None
    shape = batch, n_keys, kv_heads, head_dim
    if page:
        n_pages = batch * (n_keys // page)
        table = torch.randperm(n_pages + 3, generator=generator)[:n_pages].view(batch, -1).int()
        shape = n_pages + 3, page, kv_heads, head_dim
    q = normal(batch, n_queries, kv_heads * group, head_dim)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return q, normal(*shape), normal(*shape), lengths, table


def ours(*inputs, **named):
    return decode_attention(*inputs, scale=SCALE, implementation="triton", **named)


def plan(inputs, programs, config=SMALL):
    """Returns a plan of the kernel on a GPU of so many multiprocessors."""
    inputs = (*inputs, None, None)
    target = Target("interpreter", multiprocessors=programs)
    forced = {FORWARD: ("triton", config)}
    return plans.build(OPERATOR, "triton", inputs, (), (), target, forced)


def run(made, inputs):
    return made.run((*inputs, None, None), (SCALE,))


def one_by_one(q, k, v, lengths, table=None):
    """Computes the result in float64, by a loop over sequences, heads and queries."""
    o = torch.zeros(q.shape, dtype=torch.float64)
    n_queries, group = q.shape[2], q.shape[1] // k.shape[1]
    for b, length in enumerate(lengths.tolist()):
        for h in range(q.shape[1]):
            rows = [x[b, h // group] for x in (k, v)] if table is None else [
                torch.cat([x[page, h // group] for page in table[b].tolist()]) for x in (k, v)
            ]  # fmt: skip
            keys, values = (x.double() for x in rows)
            for t in range(n_queries):
                n = length - n_queries + 1 + t
                if n > 0:
                    p = torch.softmax(SCALE * keys[:n] @ q[b, h, t].double(), 0)
                    o[b, h, t] = p @ values[:n]
    return o


def close(found, inputs):
    torch.testing.assert_close(found.double(), one_by_one(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("programs", [1, 8, 40, 100])
def test_any_number_of_programs_shares_any_lengths(programs):
    """Ranges begin and end inside of pairs, at their edges, and some are empty."""
    chance = random.Random(programs)
    lengths = [chance.choice((0, 1, 15, 16, 17, 48, 95, 96)) for _ in range(5)]
    inputs = draw(lengths, n_queries=1 + programs % 2, seed=programs)
    close(run(plan(inputs, programs), inputs), inputs)


def test_a_pair_in_more_parts_than_are_read_at_once():
    inputs = draw([1, 1088], kv_heads=2, group=1, n_keys=1088)
    close(run(plan(inputs, 64), inputs), inputs)


@pytest.mark.parametrize("page", [None, 32])
@pytest.mark.parametrize("config", [SMALL, replace(SMALL, whole=True)])
def test_a_plan_serves_all_lengths(page, config):
    """A captured launch does so: its lengths change in place."""
    inputs = draw([96, 96, 96], page=page)
    made = plan(inputs, 4, config)
    for lengths in ([96, 96, 96], [0, 0, 0], [96, 0, 17], [1, 32, 33]):
        inputs[3].copy_(torch.tensor(lengths))
        close(run(made, inputs), inputs)


def test_a_query_without_a_key_gives_zero():
    assert (ours(*draw([0, 0], n_keys=0)) == 0).all()
    for implementation in ("triton", "sdpa", "reference"):
        inputs = draw([0, 2, 4], n_queries=4)
        o = decode_attention(*inputs, implementation=implementation)
        assert (o[0] == 0).all() and (o[1, :, :2] == 0).all()
        assert o[1, :, 2:].all() and o[2].all()


@pytest.mark.parametrize("page", [None, 32])
def test_memory_past_a_sequence_is_not_read(page):
    """NaN in rows past the lengths and in pages that nobody has, and what are no pages' numbers."""
    inputs = draw([0, 33, 96, 64], page=page)
    expected = ours(*inputs)
    q, k, v, lengths, table = inputs
    used = torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool)
    for b, length in enumerate(lengths.tolist()):
        for key in range(length):
            at = (b, key) if table is None else (table[b, key // page], key % page)
            used[at] = True
    for x in (k, v):
        x.masked_fill_(~used[:, None, :, None], float("nan"))
    if page:
        past = torch.arange(table.shape[1]) * page >= lengths[:, None]
        table.masked_fill_(past, 2**31 - 1)
    assert torch.equal(ours(q, k, v, lengths, table), expected)


def test_views_are_read_where_they_lie_in_two_launches_or_one():
    """Blocks of the default have 16 keys in float32."""
    for n_keys, launches in ((16, 1), (17, 2)):
        inputs = draw([5, 16], n_keys=n_keys)
        with recorded() as seen:
            o = ours(*inputs)
        assert len(seen) == launches and reads(seen[0], *inputs[:4])
        assert o.shape == inputs[0].shape and o.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, whole=True)])
def test_a_number_out_of_range_is_nan_in_its_own_sequence(config):
    """On CUDA the host does not know the numbers. Nothing is read there."""
    page = 16
    inputs = draw([96, 20, 40, 33], page=page)
    q, k, v, lengths, table = inputs
    made = plan(inputs, 8, config)

    def found(lengths, table):
        o = run(made, (q, k, v, lengths, table))
        expected = torch_forms.sdpa(q, k, v, lengths, table, None, None, SCALE)
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        return o.isnan().flatten(1).sum(1).tolist()

    whole = q[0].numel()
    assert found(lengths, table) == [0, 0, 0, 0]
    for wrong in (97, -(2**31)):
        assert found(torch.tensor([96, wrong, 40, 33]).int(), table) == [0, whole, 0, 0]
    places = (0, 0), (0, 96 // page - 1), (2, 0), (2, 39 // page)
    for number, (b, at) in zip((len(k), 10**6, -1, -(2**31)), places, strict=True):
        past = table.clone()
        past[b, at] = number
        assert found(lengths, past) == [whole * (b == i) for i in range(4)]
    past = table.clone()
    past[1, -(-20 // page) :] = -1  # past what is used
    assert found(lengths, past) == [0, 0, 0, 0]


def test_numbers_that_the_host_cannot_read_are_not_asked_for():
    """Calls it in one graph, and with fake tensors."""
    inputs = draw([5, 9], n_keys=32, page=16)
    compiled = torch.compile(decode_attention, fullgraph=True, backend="eager")
    close(compiled(*inputs, scale=SCALE, implementation="reference"), inputs)
    with FakeTensorMode() as mode:
        assert ours(*map(mode.from_tensor, inputs)).shape == inputs[0].shape


@pytest.mark.parametrize("each", [False, True])
def test_a_cache_in_8_bits_is_multiplied_by_its_descales(each):
    q, k, v, lengths, table = draw([1, 70, 96], page=32)
    q = q.bfloat16()
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    shape = (3, 2) if each else (2,)
    scales = [torch.rand(shape) + 0.5 for _ in range(2)]
    found = ours(q, k, v, lengths, table, *scales)
    if each:  # of a sequence's pages
        of_page = torch.zeros(len(k), dtype=torch.long)
        of_page[table.long()] = torch.arange(3)[:, None]
        scales = [scale[of_page] for scale in scales]
    k, v = (x.float() * s[..., None, None] for x, s in zip((k, v), scales, strict=True))
    expected = one_by_one(q, k, v, lengths, table)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="an interpreter has one order")
def test_equal_from_run_to_run():
    """Many programs share a pair, and come to an end in any order."""
    lengths = [16_000, 9_000, 17, 0]
    inputs = [x if x is None else x.cuda() for x in draw(lengths, n_queries=2, n_keys=16_384)]
    first = ours(*inputs)
    assert all(torch.equal(ours(*inputs), first) for _ in range(50))


def test_nan_is_not_hidden():
    inputs = draw([40, 40])
    inputs[1][0, 0, 7, 3] = float("nan")
    o = ours(*inputs)
    assert o[0, :2].isnan().all() and not o[0, 2:].isnan().any() and not o[1].isnan().any()


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA A100", "NVIDIA A10G"])
def test_blocks_fit_beside_each_other(gpu):
    target = devices.named(gpu)
    problem = OPERATOR.problem(
        "bfloat16", batch=8, heads=32, kv_heads=8, n_queries=1, n_keys=8192, head_dim=128, page=8192
    )
    found = configs(plans.Call(problem, target))
    assert len(found) == len(set(found)) > 0
    for config in found:
        blocks = (config.num_stages - 1) * 2 * config.block_n * 128 * 2
        assert config.programs * blocks <= target.shared_bytes


def test_a_program_has_a_whole_pair_if_pairs_are_many_and_short():
    """Llama 3.2 1B with 64 sequences on an H200 has 512 pairs in a wave of 528 programs."""

    def default(batch=64, n_keys=1280, head_dim=64, dtype="bfloat16", gpu="H200", **options):
        sizes = {"batch": batch, "heads": 32, "kv_heads": 8, "n_queries": 1, "n_keys": n_keys}
        sizes |= {"head_dim": head_dim, "page": n_keys}
        problem = OPERATOR.problem(dtype, **sizes, **options)
        return configs(plans.Call(problem, devices.named(gpu)))[0]

    assert default() == Config(64, 4, 4, 3, whole=True)
    assert default(n_keys=1536).whole and not default(n_keys=1537).whole
    assert default(head_dim=128, n_keys=768).whole and not default(head_dim=128).whole
    batches = {batch for batch in range(140) if default(batch).whole}  # 66 fill a wave
    assert batches == {*range(50, 67), *range(99, 133)}
    assert not default(cache="e4m3").whole and not default(dtype="float32").whole
    assert not default(gpu="A10G").whole  # too little shared memory for four programs


def test_whole_pairs_are_one_launch():
    inputs = draw([40, 17, 96, 0])
    for config, launches in ((SMALL, 2), (replace(SMALL, whole=True), 1)):
        with recorded() as seen:
            run(plan(inputs, 2, config), inputs)
        assert len(seen) == launches


def test_work_counts_the_keys_that_there_are():
    sizes = 2, 8, 2, 1, 100, 64, 100
    of = OPERATOR.case("bfloat16", *sizes, lengths="7,40")
    assert definition.work(of, "forward").read == 2 * 47 * 2 * 64 * 2 + 2 * 8 * 64 * 2
    of = OPERATOR.case("bfloat16", *sizes, cache="e4m3")
    assert definition.work(of, "forward").read == 2 * 200 * 2 * 64 + 2 * 8 * 64 * 2
    drawn = definition.lengths_of(OPERATOR.case("bfloat16", *sizes, lengths="log_uniform"))
    assert all(1 <= length <= 100 for length in drawn)


@pytest.mark.parametrize("page", [None, 32])
def test_spot_is_the_reference_of_two_heads(page):
    from tnp.ops._shared.random_values import Random

    sizes = 3, 4, 2, 2, 96, 16, page or 96
    named = {"page_table": bool(page), "k_descale": True, "descale_each": True}
    case = OPERATOR.case("float32", *sizes, lengths="5,96,40", **named)
    drawn = OPERATOR.draw(case, Random(case, torch.device("cpu")))
    inputs = {name: drawn[name] for name in OPERATOR.tensors}
    at, part = OPERATOR.partial_reference(case, inputs, None)["o"]
    whole = OPERATOR.reference(*inputs.values(), *OPERATOR.numbers)
    torch.testing.assert_close(part.float(), whole[at], rtol=1e-4, atol=1e-5)


Q, K, V, LENGTHS, TABLE = draw([5, 9], page=32)


def test_inputs_that_ask_for_gradients_are_taken_under_no_grad():
    inputs = draw([5, 9])
    with torch.no_grad():
        assert not ours(inputs[0].requires_grad_(), *inputs[1:]).requires_grad
