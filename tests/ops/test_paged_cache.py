"""Tests the paged cache: whose pages are whose, what they hold, and attention over it."""

import random

import pytest
import torch

from tnp.ops.decode_attention import decode_attention
from tnp.ops.kv_cache import paged
from tnp.ops.kv_cache.paged import CacheFull, PagedCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"n_layers": 2, "n_kv_heads": 2, "head_dim": 4}


def cache(n_pages=8, page=4, dtype=torch.float32, **sizes) -> PagedCache:
    return PagedCache(n_pages, page=page, dtype=dtype, device=DEVICE, **(SIZES | sizes))


def tokens(*shape, dtype=torch.float32):
    """Returns k and v [*, n_kv_heads, T, head_dim]."""
    return [torch.randn(*shape, device=DEVICE).to(dtype) for _ in range(2)]


def contents(of: PagedCache, handle, layer=0) -> list[torch.Tensor]:
    """Returns k and v of a sequence [n_kv_heads, T, head_dim], by its page table."""
    (length,), (table,) = of.n_keys(handle, layer).tolist(), of.page_table(handle).long()
    return [x[table].transpose(0, 1).flatten(1, 2)[:, :length] for x in of.layer(layer)]


def pages(of: PagedCache, handle) -> list[int]:
    return of.page_table(handle)[0].tolist()


def assert_holds(of: PagedCache, handle, layer, expected) -> None:
    for found, x in zip(contents(of, handle, layer), expected, strict=True):
        assert torch.equal(found, x)


def joined(before, new):
    return [torch.cat(pair, 1) for pair in zip(before, new, strict=True)]


def check_pages(of: PagedCache, sequences: dict, n_pages: int) -> None:
    """Asserts that no page is lost, and that only forks share one."""
    owners: dict[int, list] = {}
    for handle in sequences:
        for at, page in enumerate(pages(of, handle)):
            owners.setdefault(page, []).append((handle, at))
    assert len(owners) + of.n_free == n_pages
    there = of._owners_there.tolist()
    assert there == [len(owners.get(page, ())) for page in range(n_pages)]
    for found in owners.values():
        assert len({at for _, at in found}) == 1, "one page at two places"
        assert len({sequences[handle]["family"] for handle, _ in found}) == 1


def is_even(layers) -> bool:
    return len({k.shape[1] for k, _ in layers}) == 1


def test_random_operations_against_a_dictionary():
    chance, n_pages, n_layers = random.Random(0), 24, 2
    torch.manual_seed(0)
    of, sequences = cache(n_pages, page=4), {}
    full = written = 0
    for step in range(3_000):
        action = chance.choice(("allocate", *["append"] * 3, "extend", "fork", "free"))
        if action == "allocate" or not sequences:
            try:
                handle = of.allocate(chance.randint(0, 9))
            except CacheFull:
                full += 1
                continue
            empty = [[torch.zeros(2, 0, 4, device=DEVICE)] * 2 for _ in range(n_layers)]
            sequences[handle] = {"family": step, "layers": empty}
        elif action == "append":
            some = chance.sample(list(sequences), min(len(sequences), chance.randint(1, 3)))
            layer, n_tokens = chance.randrange(n_layers), chance.randint(0, 6)
            k, v = tokens(len(some), 2, n_tokens, 4)
            before = of.n_free
            try:
                if len(some) == 1:
                    of.append(some[0], k[0], v[0], layer)
                else:
                    of.append(some, k, v, layer)
            except CacheFull:
                assert of.n_free == before
                full += 1
                continue
            for at, handle in enumerate(some):
                layers = sequences[handle]["layers"]
                layers[layer] = joined(layers[layer], (k[at], v[at]))
        elif action == "extend":  # in all layers, of those that have as many tokens in each
            even = [h for h, known in sequences.items() if is_even(known["layers"])]
            some = chance.sample(even, min(len(even), chance.randint(1, 3)))
            n_tokens, before = chance.randint(0, 6), of.n_free
            try:
                of.extend(some, n_tokens)
            except CacheFull:
                assert of.n_free == before
                full += 1
                continue
            table = of.page_table(some)
            for layer in range(n_layers):
                k, v = tokens(len(some), 2, n_tokens, 4)
                of.write(k, v, of.n_keys(some, layer), table, layer)
                for at, handle in enumerate(some):
                    layers = sequences[handle]["layers"]
                    layers[layer] = joined(layers[layer], (k[at], v[at]))
            written += n_tokens > 0 and len(some) > 0
        elif action == "fork":
            handle = chance.choice(list(sequences))
            old = sequences[handle]
            sequences[of.fork(handle)] = old | {"layers": list(old["layers"])}
        else:
            handle = chance.choice(list(sequences))
            of.free(handle)
            del sequences[handle]
        check_pages(of, sequences, n_pages)
        if step % 50 == 0 or step > 2_900:
            for handle, known in sequences.items():
                for layer in range(n_layers):
                    assert_holds(of, handle, layer, known["layers"][layer])
    assert full > 100, "the pool was never full"
    assert written > 50, "nothing was written to pages that were taken before"
    for handle in list(sequences):
        of.free(handle)
    assert of.n_free == n_pages


def test_a_fork_shares_pages_until_one_of_them_writes():
    of = cache()
    first, new = of.allocate(12), tokens(2, 6, 4)  # a page that nothing is written to stays its own
    of.append(first, *new)
    second = of.fork(first)
    assert pages(of, second) == pages(of, first)[:2] and of.n_free == 5
    of.append(second, *(more := tokens(2, 1, 4)))
    assert pages(of, second)[0] == pages(of, first)[0] and of.n_free == 4
    assert pages(of, second)[1] != pages(of, first)[1]
    assert_holds(of, first, 0, new)
    assert_holds(of, second, 0, joined(new, more))
    of.free(first)
    assert of.n_free == 6
    assert_holds(of, second, 0, joined(new, more))


def test_page_tables_of_a_fixed_width():
    of = cache()
    one, two = of.allocate(1), of.allocate(9)
    table = of.page_table([one, two], columns=5)
    assert table.shape == (2, 5) and table.dtype == torch.int32
    assert table[0, 1:].tolist() == [-1] * 4 and table[1, :3].tolist() == pages(of, two)
    assert of.page_table([]).shape == (0, 0) and of.n_keys([]).shape == (0,)
    with pytest.raises(ValueError, match="columns is 2: a sequence has 3 pages"):
        of.page_table([one, two], columns=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tokens_of_any_strides_in_any_dtype(dtype):
    of = cache(dtype=dtype)
    handle = of.allocate()
    new = [x.transpose(0, 1) for x in tokens(6, 2, 4, dtype=dtype)]
    of.append(handle, *new, layer=1)
    assert of.n_keys(handle, 1).tolist() == [6] and of.n_keys(handle, 0).tolist() == [0]
    for found, x in zip(contents(of, handle, 1), new, strict=True):
        assert torch.equal(found.float(), x.float())


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_decode_attention_over_it_is_attention_over_plain_tensors(implementation):
    """A prompt for each sequence, a fork, and some steps of all of them together."""
    of = cache(n_pages=20, page=16, n_layers=1, head_dim=16)
    prompts = [tokens(2, n, 16) for n in (1, 16, 33)]
    handles = []
    for prompt in prompts:
        handles.append(of.allocate(20))
        of.append(handles[-1], *prompt)
    handles.append(of.fork(handles[2]))
    plain = [*prompts, prompts[2]]
    for _ in range(3):
        new = tokens(4, 2, 2, 16)
        of.append(handles, *new)
        plain = [joined(x, [y[b] for y in new]) for b, x in enumerate(plain)]
        q = torch.randn(4, 6, 2, 16, device=DEVICE)
        found = decode_attention(
            q, *of.layer(0), of.n_keys(handles), of.page_table(handles, columns=4),
            implementation=implementation,
        )  # fmt: skip
        for b, (k, v) in enumerate(plain):
            length = torch.tensor([k.shape[1]], dtype=torch.int32, device=DEVICE)
            alone = decode_attention(q[b : b + 1], k[None], v[None], length)
            torch.testing.assert_close(found[b : b + 1], alone, rtol=1e-5, atol=1e-5)


def captured(step):
    """Returns a function that replays a step: on a GPU its graph, elsewhere the step itself."""
    if DEVICE.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def test_a_captured_step_writes_where_its_tensors_say():
    """It passes pages' edges beside a fork, in every layer, as `append` does."""
    of, same = cache(n_pages=24), cache(n_pages=24)
    both, prompts = [], [tokens(2, 2, 3, 4) for _ in range(2)]
    for one in (of, same):
        handles = [one.allocate(), one.allocate(9)]
        for layer, prompt in enumerate(prompts):
            one.append(handles, *prompt, layer)
        both.append([*handles, one.fork(handles[1])])
    new = [tokens(3, 2, 2, 4) for _ in range(2)]
    n_keys = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(3, 5, dtype=torch.int32, device=DEVICE)

    def step():
        for layer, (k, v) in enumerate(new):
            of.write(k, v, n_keys, table, layer)

    replay = None
    for _ in range(5):
        for x in (x for pair in new for x in pair):
            x.normal_()
        of.extend(both[0], 2)
        n_keys.copy_(of.n_keys(both[0]))
        table.copy_(of.page_table(both[0], columns=5))
        replay = replay or captured(step)  # whose first run writes the same to the same place
        replay()
        for layer, (k, v) in enumerate(new):
            same.append(both[1], k, v, layer)
        for layer in range(2):
            for found, expected in zip(*both, strict=True):
                assert_holds(of, found, layer, contents(same, expected, layer))
    assert of.n_free == same.n_free == 24 - 3 * 4


def test_an_extension_that_does_not_fit_changes_nothing():
    of = cache(n_pages=2)
    handle = of.allocate()
    of.extend(handle, 7)
    with pytest.raises(CacheFull, match="1 pages of 4 tokens are needed and 0 of 2 are free"):
        of.extend(handle, 2)
    of.extend(handle, 0)
    assert of.n_keys(handle, 1).tolist() == [7]
    with pytest.warns(DeprecationWarning, match="PagedCache.lengths is now n_keys"):
        assert of.lengths(handle, 1).tolist() == [7]
    other = cache()
    uneven = other.allocate()
    other.append(uneven, *tokens(2, 3, 4), layer=1)
    with pytest.raises(ValueError, match=r"handle 0 has \[0, 3\] tokens in its layers"):
        other.extend(uneven, 1)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there an assertion ends the CUDA context")
def test_tokens_beyond_a_page_table_are_refused():
    of, new = cache(), tokens(1, 2, 2, 4)
    table = of.page_table(of.allocate(9), columns=8)
    for length in (1, 33):
        with pytest.raises(ValueError, match=f"n_keys is {length} in sample 0: it must lie betwe"):
            of.write(*new, torch.tensor([length], dtype=torch.int32), table)
    with pytest.raises(ValueError, match="page_table"):  # past the pages that the sequence has
        of.write(*new, torch.tensor([13], dtype=torch.int32), table)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there an assertion ends the CUDA context")
@pytest.mark.parametrize("traced", [False, True])
def test_a_page_that_is_written_has_one_owner(monkeypatch, traced):
    """The table lies in a tensor of the caller's, which the cache did not give."""
    kind, sentence = ValueError, r"page \d of sample 0 has {} owners: a page that is written must"
    if traced:  # as on CUDA, where the host does not know the owners
        monkeypatch.setattr(paged, "numbers_on_host", lambda *_: None)
        kind, sentence = RuntimeError, "a page that is written must have exactly one owner"
    of, new = cache(), tokens(1, 2, 1, 4)
    handle = of.allocate()
    of.extend(handle, 6)
    n_keys, table = of.n_keys(handle), of.page_table(handle).clone()
    of.write(*new, n_keys, table)
    kept = [x.clone() for x in of.layer(0)]
    fork = of.fork(handle)
    with pytest.raises(kind, match=sentence.format(2)):
        of.write(*new, n_keys, table)
    of.free(handle)
    of.write(*new, n_keys, table)  # which are the fork's alone now
    of.free(fork)
    with pytest.raises(kind, match=sentence.format(0)):
        of.write(*new, n_keys, table)
    for x, was in zip(of.layer(0), kept, strict=True):
        assert torch.equal(x, was)


def test_a_table_that_is_older_than_its_pages_is_refused():
    of, new = cache(), tokens(2, 2, 1, 4)
    one, two = of.allocate(), of.allocate()
    of.extend([one, two], 5)
    n_keys, table = of.n_keys([one, two]), of.page_table([one, two])
    of.extend(one, 8)  # which takes pages, and moves none
    of.write(*new, n_keys, table)
    fork = of.fork(two)
    of.extend(two, 1)
    with pytest.raises(ValueError, match="older than its pages: sequence 1 of it wrote to a page"):
        of.write(*new, n_keys, table)
    table = of.page_table([one, two])
    of.write(*new, of.n_keys([one, two]), table)
    of.free(one)
    with pytest.raises(ValueError, match="older than its pages: sequence 0 of it was freed since"):
        of.write(*new, n_keys, table)
    table.copy_(of.page_table([two, fork], columns=table.shape[1]))  # the caller's own since
    of.write(*new, of.n_keys([two, fork]), table)
    with torch.inference_mode():
        of.write(*new, of.n_keys([two, fork]), of.page_table([two, fork]))


def test_a_step_that_writes_is_one_graph():
    of, new = cache(), tokens(1, 2, 3, 4)
    handle = of.allocate()
    of.extend(handle, 3)
    write = torch.compile(of.write, fullgraph=True, backend="eager")
    write(*new, of.n_keys(handle), of.page_table(handle))
    assert_holds(of, handle, 0, [x[0] for x in new])


def test_bad_input_is_one_sentence():
    of, other = cache(), cache()
    handle, freed, theirs = of.allocate(), of.allocate(), other.allocate()
    of.free(freed)
    k, v = tokens(2, 3, 4)
    wrong = [
        (lambda: of.append(freed, k, v), "handle 0 was freed"),
        (lambda: of.free(freed), "handle 0 was freed"),
        (lambda: of.page_table([handle, freed]), "handle 1 was freed: its pages may belong"),
        (lambda: of.page_table([handle, theirs]), "handle 1 belongs to another cache"),
        (lambda: of.fork(theirs), "handle 0 belongs to another cache"),
        (lambda: of.n_keys([handle, 3]), "handle 1 is 3: it must be a result of allocate or fork"),
        (lambda: of.page_table([handle, handle]), "handles has a handle twice"),
        (lambda: of.append(handle, k, v, layer=2), "layer is 2: it must be from 0 to 1"),
        (lambda: of.layer(0.0), "layer is 0.0: it must be from 0 to 1"),
        (lambda: of.layer(True), "layer is True: it must be from 0 to 1"),
        (lambda: of.append(handle, None, v), "k is None: it must be a tensor"),
        (lambda: of.append(handle, k, [1]), "v is of type list: it must be a tensor"),
        (lambda: of.write(k[None], v[None], [3], of.page_table(handle)), "n_keys is of type list"),
        (lambda: of.write(k[None], v[None], of.n_keys(handle), None), "page_table is None: it mu"),
        (lambda: of.layer(-1), "layer is -1: it must be from 0 to 1"),
        (lambda: of.append(handle, k.half(), v), "k is torch.float16 on .* and the cache"),
        (lambda: of.append(handle, k, v.to("meta")), "v is torch.float32 on meta and the cache"),
        (lambda: of.append(handle, k[:1], v[:1]), r"k has shape \(1, 1, 3, 4\): it must be \[1, 2"),
        (lambda: of.append([handle], k, v), r"k has shape \(2, 3, 4\): it must be \[1, 2, T, 4\]"),
        (lambda: of.append(handle, k, v[:, :2]), "they must be equal"),
        (lambda: of.write(k[None], v[None], of.n_keys(handle), of.page_table([])), "page_table"),
        (lambda: of.write(k, v, of.n_keys(handle), of.page_table(handle)), "k has shape"),
        (lambda: of.extend(handle, -1), "n_tokens is -1: it must be a whole number, at least 0"),
        (lambda: of.allocate(-1), "n_tokens is -1: it must be a whole number, at least 0"),
        (lambda: cache(n_pages=0), "n_pages is 0: it must be a whole number, at least 1"),
        (lambda: cache(head_dim=2.5), "head_dim is 2.5: it must be a whole number"),
        (lambda: cache(dtype=torch.int32), "dtype is torch.int32: choose from torch.float64"),
        (lambda: of.append(None, k, v), "handles is None: it must be a handle, or a list of them"),
        (lambda: of.append(handle, k.clone().requires_grad_(), v), "k asks for a gradient and a"),
        (lambda: of.write(k[None], v[None], torch.tensor([3]), of.page_table(handle)), "n_keys"),
    ]
    for call, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            call()
    assert of.n_keys(handle).tolist() == [0] and of.n_free == 8
