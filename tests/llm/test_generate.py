"""Tests of text: prompts, steps, caches and the loop."""

import pytest
import torch

from tests.llm.test_decoder import TINY
from tests.refusals import assert_refused
from tnp.llm import models, reference
from tnp.llm.cache import Cache
from tnp.llm.steps import step_of
from tnp.llm.torch_step import TorchStep
from tnp.ops.kv_cache.paged import PagedCache

IDS = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([7, 2, 5], dtype=torch.int32)


def greedy(decoder, prompt, n):
    """Returns the tokens that the reference takes, each from all tokens before."""
    ids = prompt
    for _ in range(n):
        ids = torch.cat((ids, reference.logits(decoder, ids)[:, -1:].argmax(-1)), 1)
    return ids[:, prompt.shape[1] :]


@pytest.mark.parametrize("kind", TINY)
def test_ragged_prompts_give_the_references_tokens(kind):
    decoder = models.draw(TINY[kind], dtype=torch.float64)
    found = decoder.generate(IDS, max_new_tokens=40, lengths=LENGTHS)
    assert found.shape == (3, 40) and len(found.unique()) > 5
    for row, ids, length in zip(found, IDS, LENGTHS, strict=True):
        assert torch.equal(row[None], greedy(decoder, ids[None, :length], 40))


@pytest.mark.parametrize("n", [1, 2, 16, 17, 33])
def test_any_number_of_tokens_begins_alike(n):
    decoder = models.draw(TINY["llama"])
    assert torch.equal(
        decoder.generate(IDS, max_new_tokens=n), decoder.generate(IDS, max_new_tokens=40)[:, :n]
    )


def test_a_sequence_ends_and_the_rest_is_padding():
    decoder = models.draw(TINY["qwen3"])
    free = decoder.generate(IDS, max_new_tokens=40)
    firsts = {stop: [row.tolist().index(stop) for row in free if stop in row] for stop in range(50)}
    # An id that all sequences have, the last behind a look at the device.
    stop, ends = next((s, e) for s, e in firsts.items() if len(e) == 3 and 16 <= max(e) < 39)
    stops = [stop, 999]
    found = decoder.generate(IDS, max_new_tokens=40, eos_token_id=stops, pad_token_id=49)
    assert found.shape == (3, max(ends) + 1)
    for row, expected, end in zip(found, free, ends, strict=True):
        assert torch.equal(row[: end + 1], expected[: end + 1]) and (row[end + 1 :] == 49).all()
    by_stop = decoder.generate(IDS, max_new_tokens=40, eos_token_id=stops)
    assert set(by_stop[ends.index(min(ends)), min(ends) + 1 :].tolist()) == {stop}
    with pytest.raises(ValueError, match="pad_token_id is 50: it must lie between 0 and 49"):
        decoder.generate(IDS, max_new_tokens=2, eos_token_id=stop, pad_token_id=50)
    never = decoder.generate(IDS, max_new_tokens=20, eos_token_id=999)
    assert torch.equal(never, free[:, :20])


def test_draws_repeat_with_their_generator():
    decoder = models.draw(TINY["llama"])

    def drawn(seed, **how):
        generator = torch.Generator().manual_seed(seed)
        return decoder.generate(IDS, max_new_tokens=20, temperature=1.0, generator=generator, **how)

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    greedily = decoder.generate(IDS, max_new_tokens=20)
    assert torch.equal(drawn(1, top_k=1), greedily) and torch.equal(drawn(2, top_p=1e-6), greedily)


def test_a_dtype_of_16_bits_runs_on_a_cpu():
    for dtype in (torch.bfloat16, torch.float16):
        decoder = models.draw(TINY["llama"], dtype=dtype)
        assert decoder.quantize(4, 32, 8).generate(IDS, max_new_tokens=3).shape == (3, 3)


def test_pages_and_forks_give_the_same_logits():
    decoder = models.draw(TINY["llama"], dtype=torch.float64)
    s, step = decoder.sizes, TorchStep(decoder)
    sizes = {"n_layers": s.n_layers, "n_kv_heads": s.n_kv_heads, "head_dim": s.head_dim}
    pool = PagedCache(20, page=4, **sizes, dtype=decoder.dtype, device="cpu")
    handles = [pool.allocate() for _ in range(2)]
    cache = Cache.of_pages(pool, handles, 7)
    step.prompt(IDS[:2], cache)
    assert cache.lengths.tolist() == [7, 7] and cache.capacity == 7
    fork = pool.fork(handles[1])
    cache = Cache.of_pages(pool, [*handles, fork], 2)
    assert not cache.is_empty and cache.capacity == 9
    more = torch.tensor([[1, 2], [3, 4], [5, 6]])
    for ids in more.t():
        found = step(ids, cache)
    expected = reference.logits(decoder, torch.cat((IDS[[0, 1, 1]], more), 1))[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_full_cache_and_unfit_lengths_are_refused():
    decoder = models.draw(TINY["llama"])
    step, cache = TorchStep(decoder), Cache(decoder, 3, 8)
    step.prompt(IDS, cache)
    step(IDS[:, 0], cache)
    assert_refused(
        (lambda: step(IDS[:, 0], cache), "lengths is 8 in sample 0: it must lie between 0 and 7"),
        (lambda: step.prompt(IDS, cache, LENGTHS), "lengths is given and the cache holds tokens"),
        (lambda: Cache(decoder, 0, 8), "batch is 0: it must be a whole number, at least 1"),
        (lambda: Cache(decoder, 1, 65), "a sequence would have 65 tokens: .* at most 64"),
        (lambda: step_of(decoder, "fast"), "choose from auto, torch, fused"),
    )
    cache.reset()
    longer = IDS.repeat(1, 2)
    assert_refused(
        (lambda: step.prompt(longer, cache), "ids has 14 tokens: the cache has room for 8")
    )
    assert step.prompt(IDS, cache, LENGTHS).shape == (3, 50)


def test_bad_arguments_are_refused():
    decoder = models.draw(TINY["gpt2"])

    def call(ids=IDS, n=3, **how):
        return lambda: decoder.generate(ids, max_new_tokens=n, **how)

    assert_refused(
        (call(IDS.tolist()), "ids is of type list: it must be a tensor"),
        (call(IDS[0]), r"ids is torch.int64 \(7,\): it must be int64 \[B, T\]"),
        (call(IDS.int()), r"ids is torch.int32 \(3, 7\): it must be int64"),
        (call(IDS[:, :0]), r"ids is torch.int64 \(3, 0\)"),
        (call(IDS + 49), "ids has [0-9]+: it must lie between 0 and 49"),
        (call(IDS - 49), "ids has -[0-9]+: it must lie between 0 and 49"),
        (call(n=0), "max_new_tokens is 0: it must be a whole number, at least 1"),
        (call(n=59), "a sequence would have 65 tokens: this decoder's sequences have at most 64"),
        (call(temperature=-1.0), "temperature is -1.0"),
        (call(temperature=1.0, top_p=2.0), "top_p is 2.0"),
        (call(eos_token_id=-1), "eos_token_id is -1: it must be a whole number, at least 0"),
        (call(pad_token_id=-1), "pad_token_id is -1"),
        (call(lengths=LENGTHS.long()), r"lengths is torch.int64 \(3,\): it must be int32"),
        (call(lengths=LENGTHS + 1), "lengths is 8 in sample 0: it must lie between 1 and 7"),
        (call(implementation="fast"), "unknown implementation 'fast'"),
    )
    assert decoder.generate(IDS, max_new_tokens=58).shape == (3, 58)
