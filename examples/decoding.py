"""Decodes three sequences, one of them a fork, with `PagedCache` and `decode_attention`.

python examples/decoding.py [STEPS]
"""

import sys

import torch

from tnp.ops.decode_attention import decode_attention
from tnp.ops.kv_cache.paged import PagedCache

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
device = "cuda" if torch.cuda.is_available() else "cpu"
like = {"device": device, "dtype": torch.bfloat16}
implementation = "triton" if device == "cuda" else "sdpa"
heads, kv_heads, head_dim, n_layers = 8, 2, 64, 2
sizes = {"n_layers": n_layers, "n_kv_heads": kv_heads, "head_dim": head_dim}
n_pages = 3 * -(-(100 + steps) // 64)
cache = PagedCache(n_pages, page=64, **sizes, **like)
first, second = cache.allocate(), cache.allocate()
for handle, n_tokens in ((first, 100), (second, 30)):  # prompts of different lengths
    for layer in range(n_layers):
        cache.append(handle, *torch.randn(2, kv_heads, n_tokens, head_dim, **like), layer)
handles = [first, second, cache.fork(first)]  # the fork shares pages until either one writes
for _ in range(steps):
    for layer in range(n_layers):
        q = torch.randn(3, heads, 1, head_dim, **like)  # a model would compute q, k and v
        cache.append(handles, *torch.randn(2, 3, kv_heads, 1, head_dim, **like), layer)
        n_keys, table = cache.n_keys(handles, layer), cache.page_table(handles)
        o = decode_attention(q, *cache.layer(layer), n_keys, table, implementation=implementation)
print(f"{n_keys.tolist()} tokens in {n_pages - cache.n_free} pages, o {tuple(o.shape)}")
for handle in handles:
    cache.free(handle)
