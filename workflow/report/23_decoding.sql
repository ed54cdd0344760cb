-- # Decoding
-- One new token of each sequence over cached keys and values, 32 heads over 8 heads of keys, of 128
-- dimensions each, bfloat16: a cache of 4 KiB a token. `b64_32k` is 64 sequences of 32,768 tokens;
-- of `ragged` ones the lengths are drawn log-uniform up to that. `paged` caches lie in pages of 256
-- tokens, and `sdpa` and `compiled` first gather them. "Share of the ceiling" is of the rate at
-- which PyTorch's sum reads 1 GiB on the same GPU, which a longer read can surpass.
select
    device,
    shape,
    implementation as ours,
    time_ms as ms,
    format('{:.0f} %', 100 * share_of_roofline) as share_of_the_ceiling,
    others as "the_others,_ms",
    ratio_cell(speedup_best, speedup_best_low, speedup_best_high) as against_their_best,
    verdict_best as verdict,
    evidence_cell(counts, why_not) as evidence
from own_operators
where op = 'decode_attention'
order by device asc, shape asc, implementation asc;
