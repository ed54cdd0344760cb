"""Generates tokens with a small random language model, quantizes it, saves it and reads it again.

python examples/generate.py [NEW_TOKENS]

A model of Hugging Face's is read by `Decoder.of(model)`. Or its own `generate` uses the kernels:
`model.generate(ids, custom_generate=tnp.llm.huggingface.decode)`.
"""

import sys

import torch

from tnp.llm import Decoder, models

new_tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 48
device = "cuda" if torch.cuda.is_available() else "cpu"
decoder = models.draw("small_llama", dtype=torch.bfloat16, device=device)

generator = torch.Generator().manual_seed(0)
prompts = torch.randint(decoder.sizes.vocab, (2, 12), generator=generator).to(device)
lengths = torch.tensor([12, 7], dtype=torch.int32, device=device)  # the second is shorter
greedy = decoder.generate(prompts, max_new_tokens=new_tokens, lengths=lengths)
print("greedy", greedy[:, :10].tolist())
drawn = decoder.generate(
    prompts, max_new_tokens=new_tokens, lengths=lengths, temperature=0.8, top_k=50, top_p=0.95,
    generator=torch.Generator(device).manual_seed(0),
)  # fmt: skip
print("drawn", drawn[:, :10].tolist())

quantized = decoder.quantize(bits=4, group=64, head_bits=8)
print(f"{decoder.nbytes / 1e6:.2f} MB, in 4 bits {quantized.nbytes / 1e6:.2f} MB")
quantized.save("decoder")
again = Decoder.load("decoder", device)
tokens = again.generate(prompts, max_new_tokens=new_tokens, lengths=lengths)
print("in 4 bits", tokens[:, :10].tolist())
assert torch.equal(tokens, quantized.generate(prompts, max_new_tokens=new_tokens, lengths=lengths))
