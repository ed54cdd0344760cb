"""Checks language models: the reference against Hugging Face, and steps against the reference.

Gates `decoder--<kind>` compare in float64: the reference with Hugging Face's model, and a prompt at
once, in pieces and token by token with the reference. Hugging Face computes RMSNorm and the
rotation in float32 in any dtype, so Llama and Qwen3 are held to 1e-6.

Gates `decode--<kind>` hold each step in 16 bits, on a CPU in float32 too, to float64 of the same
weights. The step reads a given text, because one different token would change all that follow. The
error of logits may be twice that of Hugging Face's eager form in the same dtype, at every token.
Prompts have different lengths, and the cache is contiguous or in pages in random order. Forks of
sequences must have the bits of separate ones. The first layer's values by codes must have the error
that `tnp.gates.quantizer` derives. Weights are drawn "wide" (see `tnp.llm.models.draw`), so that
every part shows in the logits. Controls must fail. A CPU, which runs PyTorch's operators alone,
takes a quarter of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from tnp.cuda_graphs import Captures
from tnp.gates.checks import Check, Unsupported, max_abs_error, relative_error
from tnp.llm import models, reference
from tnp.llm.cache import Cache
from tnp.llm.decoder import Decoder, Layer, Linear
from tnp.llm.generate import ROUND, generate
from tnp.llm.huggingface import build, read
from tnp.llm.step import Step
from tnp.llm.steps import STEPS
from tnp.llm.tokens import Tokens
from tnp.llm.torch_step import TorchStep
from tnp.ops.kv_cache.paged import PagedCache
from tnp.util.extras import MissingExtra

EXACT = 1e-12  # relative: about ten sums of up to a thousand products, each in its own order
NEAR = {"gpt2": EXACT, "llama": 1e-6, "qwen3": 1e-6}
RATIO = 2.0  # of our error and Hugging Face's
CONTROL_BOUND = 1e-2  # relative
GAP = 6.0  # errors, above which the largest logit must be the same
PROMPTS = (24, 9, 17)  # tokens of each prompt
N_STEPS = 64
N_WRITTEN = 18  # tokens, more than are written between two looks
N_OF_CODES = 24  # steps with codes, which PyTorch dequantizes in every step
N_OF_FORKS = 12  # steps behind a fork
N_OF_CONTROLS = 12  # steps of a control, which shows at once
LESS_ON_CPU = 4
N_FORKED = 2  # sequences: with their forks few enough for every kernel of attention
PAGE = 16  # the longest prompt fills one, and half of another
OUTSIDE = 0.75  # stands in the cache's memory before a run
GROUP = 64
N_COPIES = 6  # of the prompts: more rows than kernels for a few rows take


def checks(device: torch.device, name: str) -> Iterator[Check]:
    what, kind = name.split("--")
    model = models.named(f"small_{kind}")
    yield from (_of_decoder if what == "decoder" else _of_steps)(model, device)


# Gates decoder--<kind>


def _of_decoder(model: models.Model, device: torch.device) -> Iterator[Check]:
    exact = models.draw(model, dtype=torch.float64, device=device)
    ids = _ids(exact, 2, 40)
    expected = reference.logits(exact, ids)
    for how, pieces in (("at once", (40,)), ("in pieces", (17, 1, 22)), ("by token", 40 * (1,))):
        found = _in_pieces(exact, ids, pieces)
        error = relative_error(found, expected[:, [end - 1 for end in accumulate(pieces)]])
        yield Check(f"float64 prompt {how} against the reference", "relative_error", error, EXACT)
    for name, broken in _broken_decoders(exact):
        error = relative_error(reference.logits(broken, ids), expected)
        yield Check(f"control must fail: {name}", "relative_error", error, CONTROL_BOUND,
                    larger_is_better=True)  # fmt: skip
    try:
        theirs = build(model, exact)
    except MissingExtra as error:
        raise Unsupported(str(error)) from None
    with torch.no_grad():
        error = relative_error(reference.logits(read(theirs), ids), theirs(ids).logits)
    yield Check("float64 reference against Hugging Face", "relative_error", error,
                NEAR[model.sizes.kind])  # fmt: skip


def _ids(decoder: Decoder, batch: int, n_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = batch, n_tokens
    return torch.randint(decoder.sizes.vocab, shape, generator=generator).to(decoder.device)


def _in_pieces(decoder: Decoder, ids: Tensor, pieces: Sequence[int]) -> Tensor:
    """Returns the logits [B, pieces, vocab] behind each piece of the prompts."""
    step, cache = TorchStep(decoder), Cache(decoder, *ids.shape)
    found = []
    for piece in ids.split(list(pieces), 1):
        single = piece.shape[1] == 1
        found.append(step(piece[:, 0], cache) if single else step.prompt(piece, cache))
    return torch.stack(found, 1)


def _broken_decoders(decoder: Decoder) -> Iterator[tuple[str, Decoder]]:
    """Yields decoders with one mistake that no cache is needed for."""
    first, second, *others = decoder.layers
    swapped = (
        replace(first, attention_norm=second.attention_norm),
        replace(second, attention_norm=first.attention_norm),
    )
    yield "the norm of the next layer", replace(decoder, layers=(*swapped, *others))
    if decoder.sizes.gated:
        yield "gate and up swapped", _each_layer(decoder, _swapped)


def _each_layer(decoder: Decoder, change: Callable[[Layer], Layer]) -> Decoder:
    return replace(decoder, layers=tuple(map(change, decoder.layers)))


def _swapped(layer: Layer) -> Layer:
    if isinstance(layer.up.weight, Tensor):
        gate, up = layer.up.weight.chunk(2)
        return replace(layer, up=Linear(torch.cat((up, gate))))
    raise TypeError("quantized weights are not swapped here")


# Gates decode--<kind>


@dataclass(frozen=True)
class Text:
    """Holds prompts of different lengths and the tokens behind them.

    `prompts` is [B, T], padded on the right, `lengths` int32 [B], `steps` [n, B]. `whole` is
    [B, T + n]: each prompt with its tokens directly behind it. `places` [n + 1, B] are the tokens
    of `whole` whose logits a run returns, the prompt's last token first.
    """

    prompts: Tensor
    lengths: Tensor
    steps: Tensor
    whole: Tensor
    places: Tensor

    @property
    def longest(self) -> int:
        """Returns how many tokens a sequence has at most."""
        return self.whole.shape[1]

    def first(self, n_steps: int) -> Text:
        """Returns the text with its first steps alone."""
        return replace(self, steps=self.steps[: _fewer(n_steps, self.whole.device)])

    def copied(self, n: int) -> Text:
        """Returns n copies of the prompts, one after the other, with their steps."""
        return replace(
            self, prompts=self.prompts.repeat(n, 1), lengths=self.lengths.repeat(n),
            steps=self.steps.repeat(1, n),
        )  # fmt: skip

    def at_places(self, logits: Tensor) -> Tensor:
        """Returns the logits [n + 1, B, vocab] of the reference's logits [B, T + n, vocab]."""
        batch = torch.arange(len(self.prompts), device=logits.device)
        return logits[batch, self.places]


def _fewer(n_steps: int, device: torch.device) -> int:
    """Returns how many steps run on a device in place of `n_steps`."""
    return n_steps if device.type == "cuda" else n_steps // LESS_ON_CPU


def _text(decoder: Decoder) -> Text:
    longest, n_steps = max(PROMPTS), _fewer(N_STEPS, decoder.device)
    ids = _ids(decoder, len(PROMPTS), longest + n_steps)
    lengths = torch.tensor(PROMPTS, dtype=torch.int32, device=ids.device)
    prompts = ids[:, :longest].clone()
    steps = torch.stack([row[n : n + n_steps] for row, n in zip(ids, PROMPTS, strict=True)], 1)
    places = lengths.long() - 1 + torch.arange(n_steps + 1, device=ids.device)[:, None]
    return Text(prompts, lengths, steps, ids, places)


def _of_steps(model: models.Model, device: torch.device) -> Iterator[Check]:
    dtypes = (torch.bfloat16, torch.float16)
    for dtype in (*dtypes, torch.float32)[: 2 if device.type == "cuda" else 3]:
        decoder = models.draw(model, dtype=dtype, device=device)
        text = _text(decoder)
        truth = _Truth(decoder, text, _eager(model, decoder, text.whole))
        yield from _of_dtype(decoder, text, truth, dtype == torch.bfloat16)
        if dtype == torch.bfloat16:
            for bits in (8, 4):
                coded = decoder.quantize(bits, GROUP, 8)
                of_codes = _Truth(coded, text, reference.logits(coded, text.whole))
                theory = _Theory(decoder, coded, truth, of_codes)
                yield from _of_codes(coded, text, of_codes, theory, bits)


class _Truth:
    """Holds float64's logits, keys and values along a text, and the errors that are allowed."""

    def __init__(self, decoder: Decoder, text: Text, usual: Tensor) -> None:
        exact, plain = [], []
        logits = reference.logits(decoder.to(dtype=torch.float64), text.whole, exact)
        reference.logits(decoder, text.whole, plain)
        self.logits = text.at_places(logits)
        self.unit = _distances(text.at_places(usual), self.logits)
        self.cached, self.cached_in_dtype = exact, plain

    def ratio(self, logits: Tensor) -> float:
        """Returns the largest ratio of a token's error and the usual one, of the first tokens."""
        n = len(logits)
        return (_distances(logits, self.logits[:n]) / self.unit[:n]).max().item()

    def differing(self, logits: Tensor) -> tuple[int, float]:
        """Returns how many largest logits differ though they stand out, and how many stand out.

        The second is a share of all tokens.
        """
        expected = self.logits[: len(logits)]
        error = (logits.double() - expected).square().mean(-1).sqrt()
        top = expected.topk(2).values
        stands_out = top[..., 0] - top[..., 1] > GAP * error
        differs = logits.argmax(-1) != expected.argmax(-1)
        return int((differs & stands_out).sum()), stands_out.double().mean().item()


def _distances(found: Tensor, expected: Tensor) -> Tensor:
    """Returns the distance of each token's logits [n, B, vocab] in float64, over the batch: [n]."""
    distance = (found.double() - expected).flatten(1).norm(dim=1)
    return torch.where(distance.isfinite(), distance, torch.inf)


def _eager(model: models.Model, decoder: Decoder, ids: Tensor) -> Tensor:
    """Returns Hugging Face's logits in eager form, or the plain reference's without the package."""
    try:
        theirs = build(model, decoder)
    except MissingExtra:
        return reference.logits(decoder, ids)
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        return theirs(ids).logits


def _of_dtype(decoder: Decoder, text: Text, truth: _Truth, with_controls: bool) -> Iterator[Check]:
    dtype = str(decoder.dtype).removeprefix("torch.")
    for name, step in _steps(decoder):
        check = partial(_check, dtype, name)
        cache = Cache(decoder, len(PROMPTS), text.longest + 3)
        for memory in (*cache.keys, *cache.values):
            memory.fill_(OUTSIDE)
        found = _run(step, text, cache)
        yield check("logits at every token", "error_ratio", truth.ratio(found), RATIO)
        differing, share = truth.differing(found)
        yield check("largest logits that stand out and differ", "count", differing, 0.0)
        yield check("largest logits that stand out", "share", share, 0.5, larger_is_better=True)
        yield check("keys and values", "error_ratio", _cached_ratio(cache, truth), RATIO)
        yield check("writes beyond the lengths", "max_abs_error", _outside(cache), 0.0)
        again = _run(step, text, Cache(decoder, len(PROMPTS), cache.capacity))
        yield check("equal bits in another run", "max_abs_error", max_abs_error(again, found), 0.0)
        yield from _of_many(decoder, step, text, truth, check)
        if decoder.device.type == "cuda":
            captured = _run(step, text, Cache(decoder, len(PROMPTS), cache.capacity), True)
            error = max_abs_error(captured, found)
            yield check("equal bits from a CUDA graph", "max_abs_error", error, 0.0)
        if with_controls:  # once is enough: no kernel of its own depends on the dtype
            yield from _of_generate(decoder, name, step, text, check)
        paged, spare = _in_pages(decoder, text)
        yield check("pages in random order", "error_ratio",
                    truth.ratio(_run(step, text, paged)), RATIO)  # fmt: skip
        yield check("writes beyond the lengths, in pages", "max_abs_error",
                    max(_outside(paged), _change(spare())), 0.0)  # fmt: skip
        yield from _of_forks(decoder, step, text, check)
        for what, broken in _broken_runs(decoder, step, text) if with_controls else ():
            yield check(f"control must fail: {what}", "error_ratio", truth.ratio(broken), RATIO,
                        larger_is_better=True)  # fmt: skip


def _of_generate(
    decoder: Decoder, name: str, step: Step, text: Text, check: Callable[..., Check]
) -> Iterator[Check]:
    """Holds `generate` to the step's largest logits, and sampling to itself."""

    def generated(**sampling: object) -> Tensor:
        return generate(
            decoder, text.prompts, max_new_tokens=N_WRITTEN, lengths=text.lengths,
            implementation=name, **sampling,
        )  # fmt: skip

    differing = int((generated() != _written(step, text)).sum())
    yield check("greedy tokens of generate that differ", "count", differing, 0.0)
    drawn = []
    for seed in (3, 3, 4):
        generator = torch.Generator(decoder.device).manual_seed(seed)
        drawn.append(generated(temperature=1.0, top_k=50, top_p=0.9, generator=generator))
    differing = int((drawn[0] != drawn[1]).sum())
    yield check("drawn tokens that differ with an equal seed", "count", differing, 0.0)
    differing = int((drawn[0] != drawn[2]).sum())
    yield check("control must fail: another seed", "count", differing, 0.0, larger_is_better=True)


def _of_many(
    decoder: Decoder, step: Step, text: Text, truth: _Truth, check: Callable[..., Check]
) -> Iterator[Check]:
    """Runs copies of the prompts, more rows than kernels for a few rows take.

    Attention reads the longest cache in parts and adds them up.
    """
    many = text.first(N_OF_CONTROLS).copied(N_COPIES)
    n, capacity = len(many.prompts), decoder.sizes.longest
    logits = _run(step, many, Cache(decoder, n, capacity))
    ratio = max(truth.ratio(copy) for copy in logits.split(len(PROMPTS), 1))
    yield check(f"{n} sequences: logits at every token", "error_ratio", ratio, RATIO)
    cache, beside = Cache(decoder, n, capacity), Cache(decoder, n, capacity)
    tokens, differing = Tokens(n, 1, (), 0, decoder.device), 0
    for one in (cache, beside):
        tokens.ids.copy_(step.prompt(many.prompts, one, many.lengths).argmax(-1))
    for _ in many.steps:
        largest = step(tokens.ids, beside).argmax(-1)
        tokens.begin_block()
        step.follow(tokens, cache)
        differing += int((tokens.ids != largest).sum())
    yield check(f"{n} sequences: greedy tokens that differ", "count", differing, 0.0)


def _written(step: Step, text: Text) -> Tensor:
    """Returns the tokens [B, N_WRITTEN] of the largest logits, a step each.

    The cache has the capacity of `generate`'s: sums over parts of it depend on how many there are.
    """
    cache = Cache(step.decoder, len(PROMPTS), ROUND)
    chosen = [step.prompt(text.prompts, cache, text.lengths).argmax(-1)]
    while len(chosen) < N_WRITTEN:
        chosen.append(step(chosen[-1], cache).argmax(-1))
    return torch.stack(chosen, 1)


def _check(dtype: str, name: str, what: str, metric: str, *bounded: float, **more: bool) -> Check:
    return Check(f"{dtype}: {what}", metric, *bounded, name, **more)


class _Theory:
    """Holds the error that codes should give to the first layer's values, behind its norm.

    `expected` joins two errors: r of `tnp.gates.quantizer`, for the weight's rows that give values,
    and the rounding of the plain reference. Neither a norm nor a rotation comes after values, so
    the cache holds the product itself.
    """

    def __init__(self, decoder: Decoder, coded: Decoder, truth: _Truth, of_codes: _Truth) -> None:
        s = decoder.sizes
        rows = slice(-s.n_kv_heads * s.head_dim, None)
        weight, scales = decoder.layers[0].qkv.weight[rows], coded.layers[0].qkv.weight.scales[rows]
        r = scales.double().square().mean().div(12).sqrt() / weight.double().std()
        (_, exact), (_, of_exact), (_, plain) = (
            one[0] for one in (truth.cached, of_codes.cached, of_codes.cached_in_dtype)
        )
        self.expected = math.hypot(r.item(), relative_error(plain, of_exact))
        bias = decoder.layers[0].qkv.bias
        self._bias = 0.0 if bias is None else bias[rows].double().view(s.n_kv_heads, 1, -1)
        self._values = exact - self._bias

    def off(self, cache: Cache) -> float:
        """Returns |error / expected − 1| for the error of a cache's values."""
        found, exact = (
            torch.cat([row[:, :n] for row, n in zip(x, cache.lengths.tolist(), strict=True)], 1)
            for x in (cache.values[0].double() - self._bias, self._values)
        )
        return abs(relative_error(found, exact) / self.expected - 1)


def _of_codes(
    decoder: Decoder, text: Text, truth: _Truth, theory: _Theory, bits: int
) -> Iterator[Check]:
    of = f"bfloat16, weights of {bits} bits"
    for name, step in _steps(decoder):
        cache = _new(decoder, text)
        found = _run(step, text.first(N_OF_CODES), cache)
        yield Check(f"{of}: logits at every token", "error_ratio", truth.ratio(found), RATIO, name)
        differing, _ = truth.differing(found)
        yield Check(f"{of}: largest logits that stand out and differ", "count", differing, 0.0,
                    name)  # fmt: skip
        yield Check(f"{of}: error of the first layer's values over theory", "less 1, absolute",
                    theory.off(cache), 0.1, name)  # fmt: skip
        broken, cache = type(step)(_each_layer(decoder, _next_scales)), _new(decoder, text)
        found = _run(broken, text.first(N_OF_CONTROLS), cache)
        control = f"control must fail: {bits} bits, scales of the next group"
        yield Check(control, "error_ratio", truth.ratio(found), RATIO, name,
                    larger_is_better=True)  # fmt: skip
        yield Check(f"{control}, values", "less 1, absolute", theory.off(cache), 0.1, name,
                    larger_is_better=True)  # fmt: skip


def _next_scales(layer: Layer) -> Layer:
    def changed(linear: Linear) -> Linear:
        weight = linear.weight
        return replace(linear, weight=replace(weight, scales=weight.scales.roll(1, 1)))

    return replace(layer, qkv=changed(layer.qkv), up=changed(layer.up))


def _steps(decoder: Decoder) -> Iterator[tuple[str, Step]]:
    """Yields the implementations that can compute the decoder here.

    On a CPU that is PyTorch's: interpreted kernels would take minutes. Tests run them on a smaller
    decoder.
    """
    for name, kind in STEPS.items():
        if kind.refuses(decoder) is None and (decoder.device.type == "cuda" or kind is TorchStep):
            yield name, kind(decoder)


def _run(
    step: Step,
    text: Text,
    cache: Cache,
    captured: bool = False,
    behind_prompt: Callable | None = None,
) -> Tensor:
    """Returns the logits [n + 1, B, vocab] along a text.

    Args:
        step, text, cache: what runs, along what, and in which cache.
        captured: whether all steps but the first are replays of a CUDA graph.
        behind_prompt: is called once between the prompt and the steps, and returns another step.
    """
    found = [step.prompt(text.prompts, cache, text.lengths)]
    if behind_prompt is not None:
        step = behind_prompt()
    ids, replay, result = text.steps[0].clone(), None, None
    for now in text.steps:
        ids.copy_(now)
        if captured and len(found) > 1:
            if replay is None:
                captures = Captures(ids.device)
                replay, result = captures.capture(lambda: step(ids, cache))
            replay()
            found.append(result.clone())
        else:
            found.append(step(ids, cache).clone())
    return torch.stack(found)


def _new(decoder: Decoder, text: Text) -> Cache:
    return Cache(decoder, len(PROMPTS), text.longest)


def _in_pages(decoder: Decoder, text: Text) -> tuple[Cache, Callable[[], Tensor]]:
    """Returns a cache in pages of random order, and a function that returns all other pages."""
    pool = _pool(decoder, len(PROMPTS), text.longest)
    handles = [pool.allocate() for _ in PROMPTS]
    cache = Cache.of_pages(pool, handles, text.longest)
    return cache, partial(_others, cache)


def _pool(decoder: Decoder, n_sequences: int, n_tokens: int) -> PagedCache:
    """Returns a pool that gives its pages in random order, three more than needed.

    `OUTSIDE` is in all of its memory.
    """
    s = decoder.sizes
    pool = PagedCache(
        n_sequences * -(-n_tokens // PAGE) + 3, page=PAGE, n_layers=s.n_layers,
        n_kv_heads=s.n_kv_heads, head_dim=s.head_dim, dtype=decoder.dtype, device=decoder.device,
    )  # fmt: skip
    single = [pool.allocate(1) for _ in range(pool.n_free)]
    order = torch.randperm(len(single), generator=torch.Generator().manual_seed(2)).tolist()
    for place in order:  # a pool gives back the pages that were freed last
        pool.free(single[place])
    for layer in range(s.n_layers):
        for memory in pool.layer(layer):
            memory.fill_(OUTSIDE)
    return pool


def _others(cache: Cache) -> Tensor:
    """Returns the keys and values of the pages that are not in the cache's table."""
    used = cache.page_table.unique().tolist()
    others = [page for page in range(len(cache.keys[0])) if page not in used]
    return torch.stack([memory[others] for memory in (*cache.keys, *cache.values)])


@dataclass(frozen=True)
class _Forked:
    """Holds a run of prompts that two texts each follow.

    `logits` are [n, B, vocab], behind the prompts. `n_shared` is how many pages belong to two
    sequences, and `changed` their largest change.
    """

    logits: Tensor
    cache: Cache
    n_shared: int
    changed: float

    def contents(self) -> Tensor:
        """Returns all keys and values [2 · n_layers, B, n_kv_heads, tokens, head_dim]."""
        memories, n = (*self.cache.keys, *self.cache.values), int(self.cache.lengths[0])
        return torch.stack([_rows(self.cache, memory)[:, :, :n] for memory in memories])


def _of_forks(
    decoder: Decoder, step: Step, text: Text, check: Callable[..., Check]
) -> Iterator[Check]:
    """Compares forks, which go on differently, with separate sequences: bits are equal."""
    apart, forks, broken = (_forked(decoder, step, text, how) for how in ("no", "yes", "broken"))
    contents = apart.contents()
    yield check("forks: logits", "max_abs_error", max_abs_error(forks.logits, apart.logits), 0.0)
    yield check("forks: keys and values", "max_abs_error",
                max_abs_error(forks.contents(), contents), 0.0)  # fmt: skip
    yield check("forks: shared pages", "count", forks.n_shared, N_FORKED, larger_is_better=True)
    yield check("forks: changes of shared pages", "max_abs_error", forks.changed, 0.0)
    yield check("forks: writes elsewhere", "max_abs_error",
                max(_outside(forks.cache), _change(_others(forks.cache))), 0.0)  # fmt: skip
    for what, metric, value in (
        ("logits", "relative_error", relative_error(broken.logits, apart.logits)),
        ("keys and values", "relative_error", relative_error(broken.contents(), contents)),
        ("shared pages", "max_abs_error", broken.changed),
    ):
        yield check(f"control must fail: forks that write to one page, {what}", metric, value,
                    CONTROL_BOUND, larger_is_better=True)  # fmt: skip


def _forked(decoder: Decoder, step: Step, text: Text, how: str) -> _Forked:
    """Runs prompts of equal lengths, and two texts behind each.

    Args:
        decoder, step, text: what runs.
        how: "yes": the second text follows a fork. "no": it follows the same prompt in pages of its
            own. "broken": it follows a fork, and writes to the first text's half filled page.
    """
    n_steps, n_prompt = _fewer(N_OF_FORKS, decoder.device), max(PROMPTS)
    pool, handles = _pool(decoder, 2 * N_FORKED, n_prompt + n_steps), []
    for _ in range(2 if how == "no" else 1):  # batches of one size, so that bits are equal
        new = [pool.allocate() for _ in range(N_FORKED)]
        step.prompt(text.whole[:N_FORKED, :n_prompt], Cache.of_pages(pool, new, n_prompt))
        handles += new
    if how != "no":
        handles += [pool.fork(handle) for handle in handles]
    cache = Cache.of_pages(pool, handles, n_steps)
    if how == "broken":
        half_filled = n_prompt // PAGE
        cache.page_table[N_FORKED:, half_filled] = cache.page_table[:N_FORKED, half_filled]
    pages, owners = cache.page_table.unique(return_counts=True)
    shared = pages[owners > 1].long()
    memories = (*cache.keys, *cache.values)
    before = [memory[shared] for memory in memories]
    behind = text.whole[:, n_prompt : n_prompt + n_steps]
    ids = torch.cat((behind[:N_FORKED], behind[-N_FORKED:]))
    logits = torch.stack([step(column, cache).clone() for column in ids.t().contiguous()])
    changed = max(
        max_abs_error(memory[shared], old) for memory, old in zip(memories, before, strict=True)
    )
    return _Forked(logits, cache, len(shared), changed)


def _rows(cache: Cache, memory: Tensor) -> Tensor:
    """Returns a layer's keys or values [B, n_kv_heads, S, head_dim], out of pages if it has any."""
    if cache.page_table is None:
        return memory
    return memory[cache.page_table.long()].transpose(1, 2).flatten(2, 3)


def _outside(cache: Cache) -> float:
    """Returns the largest change of the cache's memory beyond the sequences' lengths."""
    worst = 0.0
    for memory in (*cache.keys, *cache.values):
        rows = _rows(cache, memory)
        for row, length in zip(rows, cache.lengths.tolist(), strict=True):
            worst = max(worst, _change(row[:, length:]))
    return worst


def _change(memory: Tensor) -> float:
    """Returns the largest change of memory that nobody should have written to."""
    return max_abs_error(memory, torch.full_like(memory, OUTSIDE))


def _cached_ratio(cache: Cache, truth: _Truth) -> float:
    """Returns the largest ratio of a layer's error in keys or values and the reference's error."""
    worst = 0.0
    for layer, (exact, plain) in enumerate(zip(truth.cached, truth.cached_in_dtype, strict=True)):
        for memory, wanted, usual in zip(
            (cache.keys[layer], cache.values[layer]), exact, plain, strict=True
        ):
            error = expected = 0.0
            for b, length in enumerate(cache.lengths.tolist()):
                own, theirs, right = (x[b, :, :length].double() for x in (memory, usual, wanted))
                error += (own - right).square().sum().item()
                expected += (theirs - right).square().sum().item()
            worst = max(worst, (error / expected) ** 0.5)
    return worst


def _broken_runs(decoder: Decoder, step: Step, text: Text) -> Iterator[tuple[str, Tensor]]:
    """Yields logits of runs with one mistake."""
    kind, text = type(step), text.first(N_OF_CONTROLS)
    for name, broken in _broken_decoders(decoder):
        yield name, _run(kind(broken), text, _new(decoder, text))
    tables = ("positions",) if decoder.cos is None else ("cos", "sin")
    turned = {name: getattr(decoder, name).roll(-1, 0) for name in tables}
    ahead = kind(replace(decoder, **turned))
    yield (
        "positions one off behind the prompt",
        _run(step, text, _new(decoder, text), behind_prompt=lambda: ahead),
    )
    cache = _new(decoder, text)

    def shortened() -> Step:
        cache.lengths -= 1
        return step

    yield "lengths less one", _run(step, text, cache, behind_prompt=shortened)
    paged, _ = _in_pages(decoder, text)

    def exchanged() -> Step:
        paged.page_table[:2, 0] = paged.page_table[:2, 0].flip(0)
        return step

    yield "one page another's", _run(step, text, paged, behind_prompt=exchanged)
