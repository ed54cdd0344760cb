"""Writes text with a decoder: the prompt at once, then one token after another.

On CUDA all tokens but the first two are replays of one CUDA graph. Ids, lengths, noise and the
place of the next token are on the device, and the host looks at the device after every 16 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tnp.cuda_graphs import Captures
from tnp.llm.cache import Cache
from tnp.llm.decoder import Decoder
from tnp.llm.sampling import Sampling, choose, gumbel_
from tnp.llm.steps import AUTO, step_of
from tnp.llm.tokens import Tokens
from tnp.util.checks import require_between, require_count, require_lengths, require_tensors

LOOK_EVERY = 16  # tokens between two looks at the end of sequences; noise is drawn for as many
ROUND = 256  # a cache has room for a multiple of these tokens, so that the next call may use it


class Loop:
    """Generates tokens of a batch in a cache of its own. It can be run again.

    Args:
        decoder: the decoder.
        batch: how many sequences.
        capacity: the most tokens of a sequence that are read again: all but the last.
        sampling: how tokens are chosen.
        stops: ids that end a sequence.
        pad: the id behind a sequence's end.
        implementation: the step's, a name of `tnp.llm.steps.step_of`.

    Raises:
        ValueError: as `Cache`, or the implementation is unknown.
    """

    def __init__(
        self,
        decoder: Decoder,
        batch: int,
        capacity: int,
        sampling: Sampling,
        stops: tuple[int, ...] = (),
        pad: int = 0,
        implementation: str = AUTO,
    ) -> None:
        with torch.inference_mode(False):  # the next call may be made outside of it
            self.step = step_of(decoder, implementation)
            self.cache = Cache(decoder, batch, capacity)
            self._sampling, device = sampling, decoder.device
            self._tokens = Tokens(batch, LOOK_EVERY, stops, pad, device)
            shape = LOOK_EVERY, batch, decoder.sizes.vocab
            self._noise = None if sampling.greedy else torch.empty(shape, device=device)
            self._captures = Captures(device) if device.type == "cuda" else None
            self._has_run, self._replay = False, None

    @torch.no_grad()
    def run(
        self,
        ids: Tensor,
        n: int,
        lengths: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Returns up to `n` new tokens of each sequence, int64 [B, at most n].

        There are fewer if all sequences have ended. Arguments are not checked; see `generate`.
        """
        tokens = self._tokens
        self.cache.reset()
        tokens.ended.zero_()
        self._begin_block(generator)
        tokens.add(self._chosen(self.step.prompt(ids, self.cache, lengths)))
        blocks = []
        for done in range(1, n):
            if done % LOOK_EVERY == 0:
                blocks.append(tokens.block.clone())
                if tokens.stops is not None and tokens.ended.all():
                    return self._cut(torch.cat(blocks).t())
                self._begin_block(generator)
            self._follow()
        blocks.append(tokens.block[: (n - 1) % LOOK_EVERY + 1])
        return self._cut(torch.cat(blocks).t())

    def _begin_block(self, generator: torch.Generator | None) -> None:
        self._tokens.begin_block()
        if self._noise is not None:
            gumbel_(self._noise, generator)

    def _follow(self) -> None:
        """Adds a token: launched at first, then captured, then replayed."""
        if self._captures is None or not self._has_run:
            self._step()
            self._has_run = True
            return
        if self._replay is None:
            self._replay, _ = self._captures.capture(self._step)
        self._replay()

    def _step(self) -> None:
        if self._sampling.greedy:
            self.step.follow(self._tokens, self.cache)
        else:
            self._tokens.add(self._chosen(self.step(self._tokens.ids, self.cache)))

    def _chosen(self, logits: Tensor) -> Tensor:
        noise = None
        if self._noise is not None:
            noise = self._noise.index_select(0, self._tokens.place[:1])[0]
        return choose(logits, self._sampling, noise)

    def _cut(self, tokens: Tensor) -> Tensor:
        """Returns the tokens [B, n] up to the last sequence's end."""
        if self._tokens.stops is None or not self._tokens.ended.all():
            return tokens.contiguous()
        ends = torch.isin(tokens, self._tokens.stops).int().argmax(1)  # the first of each sequence
        return tokens[:, : int(ends.max()) + 1].contiguous()


def generate(
    decoder: Decoder,
    ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    lengths: Tensor | None = None,
    generator: torch.Generator | None = None,
    implementation: str = AUTO,
) -> Tensor:
    """Returns new tokens behind each prompt, int64 [B, n], n at most `max_new_tokens`.

    On CUDA the decoder keeps the cache and the graph for the next call with the same arguments.
    Sampling needs memory for 16 · B · vocab float32 numbers of noise.

    Args:
        decoder: the decoder.
        ids: the prompts, int64 [B, T] on the decoder's device, shorter ones padded on the right.
        max_new_tokens: the most new tokens of a sequence.
        temperature, top_k, top_p: how tokens are chosen, see `tnp.llm.sampling.Sampling`.
        eos_token_id: one id or several that end a sequence. The result then has `pad_token_id`
            behind the end, and as many columns as the longest sequence needs.
        pad_token_id: an id of the vocabulary; None: the first of `eos_token_id` that is one.
        lengths: int32 [B], the tokens of each prompt, from 1 to T; None: T.
        generator: of the random numbers, on the decoder's device; None: PyTorch's own.
        implementation: the step's, a name of `tnp.llm.steps.step_of`.

    Raises:
        ValueError: an argument is out of its range, or a sequence would be longer than the
            decoder's longest.
    """
    _require_ids(decoder, ids)
    n = require_count("max_new_tokens", max_new_tokens, 1)
    sampling = Sampling(temperature, top_k, top_p)
    if generator is not None and generator.device.type != decoder.device.type:
        raise ValueError(
            f"generator is on {generator.device} and the decoder on {decoder.device}: they must "
            "be equal"
        )
    if lengths is not None:
        require_tensors(lengths=lengths)
        require_lengths(ids, lengths=lengths)
        require_between("lengths", lengths.cpu(), 1, ids.shape[1])
    if eos_token_id is None:
        stops: tuple[int, ...] = ()
    else:
        stops = tuple(eos_token_id) if isinstance(eos_token_id, Sequence) else (eos_token_id,)
    stops = tuple(require_count("eos_token_id", stop, 0) for stop in stops)
    vocab = decoder.sizes.vocab
    pad = next((stop for stop in stops if stop < vocab), 0)
    if pad_token_id is not None:
        pad = require_count("pad_token_id", pad_token_id, 0)
        if pad >= vocab:
            raise ValueError(f"pad_token_id is {pad}: it must lie between 0 and {vocab - 1}")
    capacity = ids.shape[1] + n - 1
    rounded = min(-(-capacity // ROUND) * ROUND, max(capacity, decoder.sizes.longest))
    key = len(ids), sampling, stops, pad, implementation
    kept, loop = decoder.kept.pop("loop", (None, None))
    if kept != key or loop.cache.capacity < capacity:
        del loop  # its memory is free for the next one
        loop = Loop(decoder, len(ids), rounded, sampling, stops, pad, implementation)
    found = loop.run(ids, n, lengths, generator)
    if decoder.device.type == "cuda":
        decoder.kept["loop"] = key, loop
    return found


def _require_ids(decoder: Decoder, ids: Tensor) -> None:
    require_tensors(ids=ids)
    if ids.dtype != torch.int64 or ids.dim() != 2 or not ids.numel():
        raise ValueError(f"ids is {ids.dtype} {tuple(ids.shape)}: it must be int64 [B, T]")
    if ids.device != decoder.device:
        raise ValueError(
            f"ids is on {ids.device} and the decoder on {decoder.device}: they must be equal"
        )
    low, high = ids.aminmax()
    vocab = decoder.sizes.vocab
    for number in (int(low), int(high)):
        if not 0 <= number < vocab:
            raise ValueError(f"ids has {number}: it must lie between 0 and {vocab - 1}")
