"""Tests of decoders: their shapes, dtypes, codes, and files."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.refusals import assert_refused
from tnp.llm import models, reference
from tnp.llm.decoder import FILE, Decoder, mapped
from tnp.llm.models import Model
from tnp.ops.quantized_linear.quantizer import QuantizedWeight, dequantize_weight

TINY = {
    "gpt2": Model(replace(models.named("small_gpt2").sizes, vocab=50, width=64, n_layers=2,
                          n_heads=2, n_kv_heads=2, head_dim=32, d_ff=128, longest=64)),
    "llama": Model(replace(models.named("small_llama").sizes, vocab=50, width=64, n_layers=2,
                           head_dim=32, d_ff=128, longest=64), 1e4),
    "qwen3": Model(replace(models.named("small_qwen3").sizes, vocab=50, width=64, n_layers=2,
                           head_dim=32, d_ff=128, longest=64), 1e4),
}  # fmt: skip
IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def tied(kind: str) -> Decoder:
    sizes = replace(TINY[kind].sizes, tied=True)
    return models.draw(replace(TINY[kind], sizes=sizes))


def test_sizes_and_shapes_that_do_not_fit_are_refused():
    sizes, decoder = TINY["llama"].sizes, models.draw(TINY["llama"])
    layer = replace(decoder.layers[1], down=decoder.layers[1].up)
    assert_refused(
        (lambda: replace(sizes, kind="bert"), "kind is 'bert': choose from gpt2, llama, qwen3"),
        (lambda: replace(sizes, width=0), "width is 0: it must be a whole number, at least 1"),
        (lambda: replace(sizes, n_kv_heads=3), "n_kv_heads is 3 and n_heads 4: the first must"),
        (lambda: replace(sizes, head_dim=31), "head_dim is 31: it must be even, for a rotation"),
        (lambda: replace(decoder, cos=decoder.cos[:9]), r"cos is \(9, 16\): with these sizes it"),
        (lambda: replace(decoder, positions=decoder.cos), r"positions is \(64, 16\): .* be None"),
        (lambda: replace(decoder, layers=decoder.layers[:1]), r"layers is \(1,\): .* \(2,\)"),
        (lambda: replace(decoder, layers=(decoder.layers[0], layer)),
         r"layers\[1\].down.weight is \(256, 64\)"),
        (lambda: decoder.to("cuda" if not torch.cuda.is_available() else "tpu"), "device is"),
        (lambda: decoder.to(dtype=torch.int8), "dtype is torch.int8: choose from torch.float64"),
        (lambda: models.draw("gpt3"), "unknown model 'gpt3': choose from gpt2, llama3_1b"),
    )  # fmt: skip


def test_a_cast_keeps_tables_codes_and_what_is_shared():
    decoder = tied("llama").quantize(4, 32)
    cast = decoder.to(dtype=torch.float64)
    assert cast.dtype == torch.float64 and cast.cos.dtype == torch.float32
    assert cast.head.weight is cast.embedding
    weight = cast.layers[0].up.weight
    assert weight.weight.dtype == torch.int32 and weight.scales.dtype == torch.float64
    assert torch.equal(
        dequantize_weight(weight, torch.float64),
        dequantize_weight(decoder.layers[0].up.weight, torch.float64),
    )
    assert decoder.nbytes == sum({id(x): x.nbytes for x in tensors(decoder)}.values())


def tensors(decoder: Decoder) -> list[torch.Tensor]:
    found = []
    mapped(decoder, lambda x: found.append(x) or x)
    return found


def test_codes_stand_for_the_weights_and_the_embedding_is_kept():
    decoder = models.draw(TINY["gpt2"], dtype=torch.bfloat16)
    coded = decoder.quantize(8, None, head_bits=4)
    assert coded.embedding is decoder.embedding
    assert [coded.layers[1].down.weight.bits, coded.head.weight.bits] == [8, 4]
    assert coded.layers[0].qkv.weight.group == decoder.sizes.width
    expected, found = reference.logits(decoder, IDS), reference.logits(coded, IDS)
    assert 0 < (found - expected).std() < 0.3 * expected.std()
    assert_refused(
        (lambda: coded.quantize(8, None), "the decoder is quantized already: quantize the orig"),
        (lambda: decoder.quantize(5, 32), "bits is 5: it must be 4 or 8"),
        (lambda: decoder.quantize(4, 48), "group is 48: it must be 32, 64, 128 or None"),
    )


@pytest.mark.parametrize("kind", TINY)
def test_a_saved_decoder_gives_equal_bits(kind: str, tmp_path: Path):
    drawn = models.draw(TINY[kind], dtype=torch.bfloat16)
    for number, decoder in enumerate((drawn, tied(kind), drawn.quantize(4, 32, 8))):
        decoder.save(tmp_path / str(number))
        again = Decoder.load(tmp_path / str(number))
        assert again.sizes == decoder.sizes and again.nbytes == decoder.nbytes
        assert torch.equal(reference.logits(again, IDS), reference.logits(decoder, IDS))
        assert (again.head.weight is again.embedding) == decoder.sizes.tied
    assert isinstance(again.head.weight, QuantizedWeight)
    file = tmp_path / "2" / FILE
    assert file.stat().st_size < 2 * decoder.nbytes  # without the weights that were quantized


def test_a_view_is_saved_without_the_memory_around_it(tmp_path: Path):
    decoder = models.draw(TINY["gpt2"])
    decoder = replace(decoder, positions=decoder.positions.repeat(100, 1)[:64])
    decoder.save(tmp_path)
    assert (tmp_path / FILE).stat().st_size < 1.5 * decoder.nbytes


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path):
    models.draw(TINY["llama"]).save(tmp_path)
    file = tmp_path / FILE
    whole = file.read_bytes()
    remedy = "name a folder that Decoder.save has written"
    assert_refused((lambda: Decoder.load(tmp_path / "no"), f"holds no {FILE}: {remedy}"))
    for damaged in (whole[:-100], whole[:5000] + b"x" + whole[5001:], b"", b"text"):
        file.write_bytes(damaged)
        assert_refused((lambda: Decoder.load(tmp_path), f"is damaged, or is none at all: {remedy}"))
    from tnp.util import tensor_archive

    tensor_archive.save(file, {"weights": {}})
    assert_refused((lambda: Decoder.load(tmp_path), "it lacks sizes"))
    tensor_archive.save(file, {"sizes": {"kind": "llama"}, "weights": {"embedding": None}})
    assert_refused((lambda: Decoder.load(tmp_path), "is of another version of tnp"))


def test_stretched_frequencies_are_those_of_llama_3():
    model = models.named("llama3_1b")
    found = models.inverse_frequencies(model)
    kept = models.inverse_frequencies(replace(model, stretch=None))
    waves, ratio = 2 * torch.pi / kept, found / kept
    assert torch.equal(ratio[waves < 8192 / 4], torch.ones(int((waves < 8192 / 4).sum())))
    torch.testing.assert_close(
        ratio[waves > 8192], torch.full((int((waves > 8192).sum()),), 1 / 32)
    )
    between = ratio[(waves > 8192 / 4) & (waves < 8192)]
    assert len(between) and ((between > 1 / 32) & (between < 1)).all()
