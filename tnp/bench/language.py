"""Times language models that write new tokens after random prompts: `FORMS`, in turn.

All forms of a job run in one process. A call begins on an idle device. Its prompts have one length,
and no two forms get the same prompts in timed calls. It returns `n_new` tokens of each; no end of a
sequence is looked for. A shorter call writes one token, and is the prompt's. A token's time is
(long call − short call) / (n_new − 1).
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import islice

import torch
from torch import Tensor

from tnp.bench.evidence import Code, packages
from tnp.bench.language_forms import BITS, FORMS, GROUP
from tnp.bench.outcome import of_generation
from tnp.bench.policy import Policy
from tnp.bench.provenance import Conditions
from tnp.bench.sampled import measured_columns, sample_rows
from tnp.bench.statistics import summarize
from tnp.bench.timing import (
    Measurement,
    call_ms,
    elapsed_ms,
    first_call,
    mark,
    measure_interleaved,
    merged,
    synchronize,
)
from tnp.cuda_graphs import Captures
from tnp.experiment.failures import Unsupported, classify
from tnp.experiment.kernel_code import launches
from tnp.llm.cache import Cache
from tnp.llm.decoder import Decoder
from tnp.llm.generate import generate
from tnp.llm.models import draw
from tnp.llm.sizes import Sizes, named
from tnp.llm.steps import step_of
from tnp.llm.tokens import Tokens

FIRST_CALLS = 3  # until everything is compiled, captured and replayed once
N_PROMPTS = 4  # of each form, which its calls take in turn
BARE_ROUNDS, BARE_STEPS = 10, 16
PROFILED_TOKENS = 8

Step = Callable[[], object]
Calls = list[Callable[[], None]]  # of one kind, with several prompts

log = logging.getLogger("tnp.bench.language")


@dataclass(frozen=True)
class Writer:
    """Holds a form that is ready to write.

    Attributes:
        write: takes prompts, int64 [batch, n_prompt] on the device, and a number n of new tokens.
            Returns the new tokens, int64 [batch, n].
        weight_bytes: bytes of its weights on the device.
        bare: is called before each round of a few decoding steps. Returns a function that makes one
            of them, without the loop around it. None if the form has no such step.
        close: ends what the form has started.
    """

    write: Callable[[Tensor, int], Tensor]
    weight_bytes: int
    bare: Callable[[], Step] | None = None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, eq=False)
class Asked:
    """Holds what all forms of a job are asked for. They share one decoder's weights."""

    model: str
    weights: str
    batch: int
    n_prompt: int
    n_new: int
    dtype: str
    device: torch.device

    @property
    def sizes(self) -> Sizes:
        """Returns the model's sizes, with sequences no longer than a call's."""
        return replace(named(self.model).sizes, longest=self.length)

    @property
    def length(self) -> int:
        """Returns the tokens of a sequence after the longest call."""
        return self.n_prompt + self.n_new

    @property
    def bare_steps(self) -> int:
        """Returns the bare steps of a round, for which a call's cache has room."""
        return min(BARE_STEPS, self.n_new - 1)

    @property
    def bits(self) -> tuple[int, int]:
        """Returns the bits of the layers' weights and of the head's."""
        return BITS[self.weights]

    @cached_property
    def decoder(self) -> Decoder:
        """Returns the decoder in `dtype`, which is not quantized."""
        on = {"dtype": getattr(torch, self.dtype), "device": self.device}
        return draw(self.model, longest=self.length, **on)

    def prompts(self, seed: int) -> Tensor:
        """Returns random prompts, int64 [batch, n_prompt]."""
        generator = torch.Generator().manual_seed(seed)
        shape = self.batch, self.n_prompt
        return torch.randint(self.sizes.vocab, shape, generator=generator).to(self.device)


def ours(asked: Asked) -> Writer:
    """Builds this project's `generate`. Its bare step is captured anew, in a cache of its own."""
    decoder, implementation = asked.decoder, FORMS["ours"].implementation
    if asked.bits != BITS["bf16"]:
        layers, head = asked.bits
        decoder = decoder.quantize(layers, GROUP, head_bits=head)

    def write(ids: Tensor, n_new: int) -> Tensor:
        return generate(decoder, ids, max_new_tokens=n_new, implementation=implementation)

    @cache
    def stepping() -> tuple[Tokens, Cache, Step]:
        tokens = Tokens(asked.batch, asked.bare_steps, (), 0, asked.device)
        memory = Cache(decoder, asked.batch, asked.length)
        memory.is_empty = False
        step = partial(step_of(decoder, implementation).follow, tokens, memory)
        step()  # compiles
        if asked.device.type == "cuda":
            tokens.begin_block()
            step, _ = Captures(asked.device).capture(step)
        return tokens, memory, step

    @torch.no_grad()
    def bare() -> Step:
        tokens, memory, step = stepping()
        tokens.begin_block()
        memory.lengths.fill_(asked.n_prompt)
        return step

    return Writer(write, decoder.nbytes, bare)


def vllm(asked: Asked) -> Writer:
    """Raises Unsupported: vLLM takes a process of its own."""
    raise Unsupported("vLLM must run in a process of its own, which this study does not start yet")


def step_bytes(sizes: Sizes, weights: str, batch: int, n_cached: int) -> float:
    """Returns the bytes that a decoding step must read: linear layers, the head and the cache once.

    Quantized weights have a 16-bit scale for each group of `GROUP`. Norms, biases and the
    embedding's rows are left out: they are less than a thousandth.

    Args:
        sizes: the model's.
        weights: a key of `BITS`.
        batch: how many sequences.
        n_cached: tokens of each sequence that are in the cache, in 16 bits.
    """
    bits = BITS[weights]
    of_layers, of_head = (n / 8 + (2 / GROUP if n < 16 else 0) for n in bits)
    heads, kv_heads = (n * sizes.head_dim for n in (sizes.n_heads, sizes.n_kv_heads))
    attention = sizes.width * (2 * heads + 2 * kv_heads)
    mlp = sizes.width * sizes.d_ff * (2 + sizes.gated)
    cached = 2 * 2 * sizes.n_layers * kv_heads * n_cached
    in_layers = sizes.n_layers * (attention + mlp)
    return of_layers * in_layers + of_head * sizes.vocab * sizes.width + batch * cached


def measure_language(
    parameters: dict, started: float, note: Callable[[str], None] = lambda doing: None
) -> dict[str, list[dict[str, object]]]:
    """Returns tables "generations", "samples" and "code" of one job, a row a form.

    A form that fails, or that cannot run here, has a status and a reason. Others go on.

    Args:
        parameters: the key of its rows, `forms`, `timing`, `device`, and `definitions`, the hashes
            of the code of each form by name.
        started: `time.perf_counter()` when the process began; `setup_s` counts from there.
        note: is called with what begins, so that nobody takes a long compilation for a hang.
    """
    fields = ("model", "weights", "batch", "n_prompt", "n_new", "dtype")
    asked = Asked(
        **{name: parameters[name] for name in fields}, device=torch.device(parameters["device"])
    )
    with ExitStack() as ends:
        return _measure(asked, parameters, started, note, ends)


def _measure(
    asked: Asked, parameters: dict, started: float, note: Callable[[str], None], ends: ExitStack
) -> dict[str, list[dict[str, object]]]:
    """Measures as `measure_language` does. What forms have started ends with `ends`."""
    rows, writers, codes = [], {}, []
    for name in parameters["forms"]:
        row = of_generation(parameters, name)
        form = FORMS[name]
        code = Code(
            packages=packages(form.packages),
            definitions=parameters.get("definitions", {}).get(name, {}),
        )
        note(f"builds {name}")
        try:
            with launches() as code.kernels:
                writer = _built(form.start, asked)
                ends.callback(writer.close)
                writers[name] = _ready(writer, asked, row)
            row |= {"status": "ok", "setup_s": time.perf_counter() - started}
        except Exception as error:  # any failure is this form's result
            log.warning("%s", name, exc_info=error)
            row["status"], row["reason"] = classify(error)
        gc.collect()  # an exception held the tensors of a form that failed
        if asked.device.type == "cuda":
            torch.cuda.empty_cache()  # graphs' pools cannot use what other calls left
        row |= {"kernels_hash": code.kernels_hash, "bytes": _counted_bytes(asked)}
        row["packages"] = json.dumps(code.packages, sort_keys=True)
        rows.append(row)
        codes += code.rows(name)
    note("takes turns")
    samples = _timed(rows, writers, asked, parameters)
    return {"generations": rows, "samples": samples, "code": codes}


def _counted_bytes(asked: Asked) -> float:
    """Returns the bytes of the mean step of a longer call."""
    n_cached = asked.n_prompt + asked.n_new // 2
    return step_bytes(asked.sizes, asked.weights, asked.batch, n_cached)


def _built(start: str, asked: Asked) -> Writer:
    module, _, name = start.partition(":")
    return getattr(importlib.import_module(module), name)(asked)


def _ready(writer: Writer, asked: Asked, row: dict[str, object]) -> Writer:
    """Returns a writer after its first calls, and adds what they took to `row`.

    Raises RuntimeError if a call does not return as many new tokens as it should.
    """
    on_cuda = asked.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    prompts = asked.prompts(0)
    calls = [asked.n_new] * FIRST_CALLS + [1] * FIRST_CALLS
    row["compile_s"] = sum(
        first_call(partial(_checked, writer, prompts, n_new), asked.device) for n_new in calls
    )
    if on_cuda:
        added = torch.cuda.max_memory_allocated() - before
        row["peak_memory_bytes"] = writer.weight_bytes + added
    return writer


def _checked(writer: Writer, prompts: Tensor, n_new: int) -> None:
    found = writer.write(prompts, n_new)
    if tuple(found.shape) != (len(prompts), n_new):
        raise RuntimeError(
            f"a call returned tokens {list(found.shape)}: they must be {[len(prompts), n_new]}"
        )


def _timed(
    rows: list[dict], writers: dict[str, Writer], asked: Asked, parameters: dict
) -> list[dict[str, object]]:
    """Adds times to the rows of `writers`. Returns the raw samples."""
    policy = Policy.from_parameters(parameters["timing"])
    contenders = [
        [_calls(writer, asked, n_new, number) for n_new in (asked.n_new, 1)]
        for number, writer in enumerate(writers.values())
    ]
    with Conditions(asked.device.type) as conditions:
        measured = _measured(contenders, asked.device, policy)
    samples = []
    of_forms = {row["form"]: row for row in rows}
    for (name, writer), (long, short) in zip(writers.items(), measured, strict=True):
        row = of_forms[name]
        row |= {"reason": long.note} | measured_columns(long, conditions)
        row |= summarize(short.samples_ms, "prompt_ms")
        row |= summarize(_token_ms(long, short, asked.n_new), "token_ms")
        row["tokens_per_s"] = 1e3 * asked.batch / row["token_ms_p50"]
        # A failure to count must not lose the times.
        for column, found in (("bare_ms", _bare_ms), ("n_kernels", _n_kernels)):
            try:
                row[column] = found(writer, asked)
            except Exception as error:
                log.warning("%s has no %s", name, column, exc_info=error)
                row[column] = None
        samples += sample_rows(row, f"generation {name}", long, conditions)
        samples += sample_rows(row, f"prompt {name}", short, conditions)
    return samples


def _measured(
    contenders: list[list[Calls]], device: torch.device, policy: Policy
) -> list[list[Measurement]]:
    """Times the calls of each form in rounds, calls of fast forms more often than of slow ones.

    A round has √(slowest / own) turns of a form, by the time of a turn. That number of samples
    makes the sum of all forms' relative variances least for a given time, if all forms vary
    equally (Neyman's allocation).
    """
    turn_ms = [sum(call_ms(calls[0], device) for calls in form) for form in contenders]
    n_turns = [round(math.sqrt(max(turn_ms) / own)) for own in turn_ms]
    copies = [form * n for form, n in zip(contenders, n_turns, strict=True)]
    measured = iter(measure_interleaved([one for form in copies for one in form], device, policy))
    found = []
    for form, n in zip(contenders, n_turns, strict=True):
        parts = list(islice(measured, n * len(form)))
        found.append([merged(parts[i :: len(form)]) for i in range(len(form))])
    return found


def _calls(writer: Writer, asked: Asked, n_new: int, number: int) -> Calls:
    """Returns calls of one form, each with prompts of its own."""

    def call(prompts: Tensor) -> None:
        synchronize(asked.device)
        writer.write(prompts, n_new)

    first = 1 + number * N_PROMPTS
    return [partial(call, asked.prompts(seed)) for seed in range(first, first + N_PROMPTS)]


def _token_ms(long: Measurement, short: Measurement, n_new: int) -> list[float]:
    """Returns a token's milliseconds in each round."""
    pairs = zip(long.samples_ms, short.samples_ms, strict=True)
    return [(whole - one) / (n_new - 1) for whole, one in pairs]


@torch.no_grad()
def _bare_ms(writer: Writer, asked: Asked) -> float | None:
    """Returns the milliseconds of one of several steps back to back, the median of rounds."""
    if writer.bare is None:
        return None
    spans = []
    for _ in range(BARE_ROUNDS):
        step = writer.bare()
        synchronize(asked.device)
        start = mark(asked.device)
        for _ in range(asked.bare_steps):
            step()
        spans.append((start, mark(asked.device)))
    synchronize(asked.device)
    return statistics.median(elapsed_ms(*span) for span in spans) / asked.bare_steps


def _n_kernels(writer: Writer, asked: Asked) -> int | None:
    """Returns the kernels and copies of one token on the device; None on a CPU.

    A profile with more new tokens has those of one token and of the tokens after it.
    """
    if asked.device.type != "cuda":
        return None
    found = []
    for n_new in (1, 1 + PROFILED_TOKENS):
        prompts = asked.prompts(0)
        _checked(writer, prompts, n_new)  # what is new at this length is compiled outside
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            writer.write(prompts, n_new)
            synchronize(asked.device)
        on_device = torch.autograd.DeviceType.CUDA
        found.append(sum(event.device_type == on_device for event in profiler.events()))
    return round((found[1] - found[0]) / PROFILED_TOKENS)
