"""Tests the step of fused kernels. Its error is held to that of the step of operators."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.problems import DEVICE
from tests.refusals import assert_refused
from tnp.dispatch.devices import Target
from tnp.gates.checks import relative_error
from tnp.llm import fused_step, models, reference
from tnp.llm.cache import Cache
from tnp.llm.decoder import Decoder, mapped
from tnp.llm.fused_step import FusedStep
from tnp.llm.sizes import Model
from tnp.llm.step import Step
from tnp.llm.steps import step_of
from tnp.llm.tokens import Tokens
from tnp.llm.torch_step import TorchStep
from tnp.ops.kv_cache.paged import PagedCache

VOCAB, N_STEPS, CAPACITY, PAGE = 50, 3, 20, 16
LENGTHS = torch.tensor([15, 2, 5], dtype=torch.int32)  # the first goes on to a second page
IDS = torch.randint(VOCAB, (3, 15 + N_STEPS), generator=torch.Generator().manual_seed(0))
OUTSIDE = 0.75  # stands in the cache's memory before a run


def drawn(kind: str, bits: int = 16, **sizes: int) -> Decoder:
    small = models.named(f"small_{kind}").sizes
    own = {"vocab": VOCAB, "width": 64, "n_layers": 2, "n_heads": 2, "head_dim": 32, "d_ff": 64}
    own |= {"n_kv_heads": 2 if kind == "gpt2" else 1, "longest": 32}
    model = Model(replace(small, **own | sizes), 1e4)
    decoder = models.draw(model, dtype=torch.bfloat16, device=DEVICE)
    return decoder if bits == 16 else decoder.quantize(bits, 32)


def caches(decoder: Decoder, batch: int = len(IDS)) -> Iterator[Cache]:
    """Yields a contiguous cache, and one in pages, with `OUTSIDE` in all memory."""
    s = decoder.sizes
    sizes = {"n_layers": s.n_layers, "n_kv_heads": s.n_kv_heads, "head_dim": s.head_dim}
    pool = PagedCache(2 * batch, page=PAGE, **sizes, dtype=decoder.dtype, device=DEVICE)
    handles = [pool.allocate() for _ in range(batch)]
    for cache in (Cache(decoder, batch, CAPACITY), Cache.of_pages(pool, handles, CAPACITY)):
        for memory in (*cache.keys, *cache.values):
            memory.fill_(OUTSIDE)
        yield cache


def prompted(step: Step, cache: Cache) -> Cache:
    step.prompt(IDS[:, :15].to(DEVICE), cache, LENGTHS.to(DEVICE))
    return cache


def new_ids() -> Tensor:
    """Returns the tokens [n, B] that follow each prompt."""
    rows = [ids[n : n + N_STEPS] for ids, n in zip(IDS, LENGTHS, strict=True)]
    return torch.stack(rows, 1).to(DEVICE)


def along(step: Step, cache: Cache, n_steps: int = N_STEPS) -> Tensor:
    """Returns the logits [n, B, vocab] of steps behind the prompts."""
    prompted(step, cache)
    return torch.stack([step(ids, cache) for ids in new_ids()[:n_steps]])


def errors(found: Tensor, expected: Tensor) -> Tensor:
    """Returns the distance of each step's logits, of the first steps."""
    return (found.double() - expected[: len(found)]).flatten(1).norm(dim=1)


def exact(decoder: Decoder) -> Tensor:
    """Returns float64's logits [n, B, vocab] of the same steps."""
    logits = reference.logits(decoder.to(dtype=torch.float64), IDS.to(DEVICE))
    places = LENGTHS.long() + torch.arange(N_STEPS)[:, None]
    return logits[torch.arange(len(IDS)), places]


def unwritten(cache: Cache) -> bool:
    """Whether memory beyond the lengths is as it was."""
    for memory in (*cache.keys, *cache.values):
        if cache.page_table is not None:
            memory = memory[cache.page_table.long()].transpose(1, 2).flatten(2, 3)
        for row, length in zip(memory, cache.lengths.tolist(), strict=True):
            if not (row[:, length:] == OUTSIDE).all():
                return False
    return True


@pytest.mark.parametrize(
    "kind, bits", [("gpt2", 16), ("llama", 16), ("qwen3", 16), ("gpt2", 8), ("llama", 4)]
)
def test_errors_are_at_most_twice_those_of_operators(kind, bits):
    decoder = drawn(kind, bits)
    step, contiguous, in_pages = FusedStep(decoder), *caches(decoder)
    runs = ((contiguous, 1), (in_pages, 2))[: 2 if bits == 16 else 1]
    expected = exact(decoder)
    bounds = 2 * errors(along(TorchStep(decoder), next(caches(decoder)), 2), expected)
    for cache, n in runs:
        found = along(step, cache, n)
        assert len(found) == n and (errors(found, expected) <= bounds[:n]).all()
        assert torch.equal(cache.lengths.cpu(), LENGTHS + n) and unwritten(cache)
    # Control: the bound tells positions that are one off.
    tables = ("positions",) if decoder.cos is None else ("cos", "sin")
    late = replace(decoder, **{name: getattr(decoder, name).roll(1, 0) for name in tables})
    assert (errors(found, exact(late)) > bounds[:n]).all()


def followed(step: Step, decoder: Decoder, stops: tuple[int, ...] = ()) -> Tokens:
    tokens, cache = Tokens(len(IDS), N_STEPS, stops, 99, DEVICE), next(caches(decoder))
    prompted(step, cache)
    tokens.ids.copy_(new_ids()[0])
    for _ in range(N_STEPS):
        step.follow(tokens, cache)
    return tokens


def test_follow_takes_the_largest_logits_and_pads_behind_stops():
    decoder = drawn("llama", n_layers=1)
    step, cache = FusedStep(decoder), next(caches(decoder))
    free = followed(step, decoder)
    prompted(step, cache)
    for ids, chosen in zip((new_ids()[0], *free.block), free.block, strict=False):
        logits = step(ids, cache)
        assert torch.equal(logits.gather(1, chosen[:, None])[:, 0], logits.amax(1))
    assert torch.equal(free.ids, free.block[-1]) and not free.ended.any()

    stop = free.block[1, 0].item()
    never = [one for one in range(VOCAB) if one not in free.block]
    expected, ended = free.block.clone(), (free.block == stop).any(0)
    behind = (expected == stop).cumsum(0).cumsum(0) > 1
    expected[behind] = 99
    stopped = followed(step, decoder, (never[0], stop, never[1]))
    assert torch.equal(stopped.block, expected) and torch.equal(stopped.ended, ended)
    assert ended[0] and behind.any() and not behind.all()


@pytest.mark.parametrize("page", [0, 16])
def test_attention_adds_up_parts_of_a_short_cache(page):
    decoder = drawn("llama", n_layers=1, n_heads=6, n_kv_heads=2, longest=300)
    step, lengths = FusedStep(decoder), [300, 129, 1, 0, 301]
    cache = Cache(decoder, len(lengths), 300)
    generator = torch.Generator().manual_seed(0)
    if page:
        pool = PagedCache(
            100, page=page, n_layers=1, n_kv_heads=2, head_dim=32, dtype=decoder.dtype,
            device=DEVICE,
        )  # fmt: skip
        cache = Cache.of_pages(pool, [pool.allocate() for _ in lengths], 300)
        cache.page_table = cache.page_table.flip(1).contiguous()
        cache.page_table[1, 3] = -1
    for memory in (*cache.keys, *cache.values):
        memory.copy_(torch.randn(memory.shape, generator=generator))
    cache.lengths.copy_(torch.tensor(lengths))
    q = torch.randn(len(lengths), 6 * 32, generator=generator).to(DEVICE, decoder.dtype)
    places = step._places(cache, 0)
    assert step._is_short(len(lengths), 3)
    found = step._attended(q, places, cache, 0)
    wrong = [1, 3, 4] if page else [3, 4]
    for b, length in enumerate(lengths):
        if b in wrong:
            assert found[b].isnan().all()
            continue
        k, v = (
            (x[cache.page_table[b].long()].transpose(0, 1).flatten(1, 2) if page else x[b])
            for x in (cache.keys[0], cache.values[0])
        )
        k, v = (x[:, :length].double().repeat_interleave(3, 0) for x in (k, v))
        scores = (k @ q[b].double().view(6, 32, 1))[..., 0] * 32**-0.5
        expected = (scores.softmax(-1)[:, None] @ v).flatten()
        assert relative_error(found[b], expected) < torch.finfo(decoder.dtype).eps
        if length > 1:  # control: another key's values
            again = torch.roll(v, 1, 1)
            assert relative_error((scores.softmax(-1)[:, None] @ again).flatten(), expected) > 0.1
    assert torch.equal(step._attended(q, places, cache, 0).nan_to_num(), found.nan_to_num())


def test_weights_may_have_any_strides_and_places():
    decoder = drawn("llama", n_layers=1)

    def strided(x: Tensor) -> Tensor:
        memory = x.new_empty(2 * x.numel() + 1)
        there = memory[1:].view(*x.shape[:-1], -1)[..., ::2]
        return there.copy_(x)

    expected, found = (
        along(FusedStep(one), next(caches(one)), 1) for one in (decoder, mapped(decoder, strided))
    )
    assert torch.equal(found, expected)


def test_an_id_out_of_range_gives_nan_to_its_sequence_alone():
    decoder = drawn("gpt2", n_layers=1)
    step, good, bad = FusedStep(decoder), *(next(caches(decoder)) for _ in range(2))
    prompted(step, good)
    prompted(step, bad)
    ids = new_ids()[0]
    expected = step(ids, good)
    ids[1] = VOCAB
    found = step(ids, bad)
    assert found[1].isnan().all() and torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("kind, bits", [("gpt2", 16), ("llama", 8), ("qwen3", 16)])
def test_more_rows_than_kernels_take_are_computed_too(kind, bits):
    decoder, n = drawn(kind, bits, n_layers=1), fused_step.FEW + 1
    steps, ids = (FusedStep(decoder), TorchStep(decoder)), torch.arange(n, device=DEVICE)
    exact_logits = reference.logits(decoder.to(dtype=torch.float64), ids[:, None])[:, 0]
    found, usual = (step(ids, next(caches(decoder, n)))[None] for step in steps)
    assert errors(found, exact_logits[None]) <= 2 * errors(usual, exact_logits[None])
    tokens = Tokens(n, 1, (), 0, DEVICE)
    tokens.ids.copy_(ids)
    steps[0].follow(tokens, next(caches(decoder, n)))
    assert torch.equal(tokens.ids, found[0].argmax(-1))


@pytest.mark.parametrize("vocab", [4 * 32, 4 * 32 + 1])
def test_the_largest_of_many_rows_is_that_of_torch(monkeypatch, vocab):
    """Rows have equal largest logits, in one part and in several, NaN and nothing but -inf."""
    monkeypatch.setattr(fused_step, "LOGITS_AT_ONCE", 32)
    decoder, n = drawn("llama", n_layers=1, vocab=vocab), fused_step.FEW + 1
    logits = torch.randint(-9, 9, (n, vocab), device=DEVICE).to(torch.bfloat16)
    logits[0] = -torch.inf
    logits[1] = 0
    logits[2, [40, 70]] = torch.nan
    logits[3, -1] = 99
    logits[4, [33, 127]] = torch.inf
    assert ((logits == logits.amax(1, keepdim=True)).sum(1) > 1).sum() > n // 2  # ties
    monkeypatch.setattr(FusedStep, "__call__", lambda self, ids, cache: logits)
    tokens = Tokens(n, 2, (7,), 3, DEVICE)
    tokens.ended[5] = True
    expected = logits.argmax(-1)
    expected[5] = 3
    step = FusedStep(decoder)
    step.follow(tokens, next(caches(decoder, n)))
    assert torch.equal(tokens.ids, expected) and torch.equal(tokens.block[0], expected)
    assert expected[2] == 40 and (tokens.place == 1).all()


def test_decoders_that_it_cannot_compute_are_refused(monkeypatch):
    decoder = drawn("llama", n_layers=1)

    def made(decoder: Decoder, target: Target | None = None):
        def make():
            with monkeypatch.context() as patch:
                if target is not None:
                    patch.setattr(fused_step, "of_device", lambda device: target)
                step_of(decoder, "fused")

        return make

    assert_refused(
        (made(decoder, Target("cpu")), "the step 'fused' cannot run here: it needs a CUDA device"),
        (made(decoder, Target("cuda", capability=75)), "needs compute capability 8.0 or newer"),
        (made(decoder.to(dtype=torch.float32)), "bfloat16 or float16, not torch.float32"),
        (made(drawn("llama", n_layers=1, head_dim=24)), "head_dim is 24 and d_ff 64: they must"),
        (made(drawn("llama", n_layers=1, d_ff=100)), "head_dim is 32 and d_ff 100: they must"),
        error=RuntimeError,
    )
    made(decoder)()


def test_pages_that_attention_cannot_read_are_refused_before_anything_is_written():
    decoder = drawn("llama", n_layers=1)
    s = decoder.sizes
    sizes = {"n_layers": 1, "n_kv_heads": s.n_kv_heads, "head_dim": s.head_dim}
    pool = PagedCache(4, page=24, **sizes, dtype=decoder.dtype, device=DEVICE)
    cache = Cache.of_pages(pool, [pool.allocate()], 20)
    with pytest.raises(ValueError, match="pages have 24 tokens: they must be multiples of 16"):
        FusedStep(decoder)(torch.zeros(1, dtype=torch.int64, device=DEVICE), cache)
    assert not cache.lengths.any()
