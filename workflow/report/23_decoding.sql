-- # Decoding
-- New tokens (`n_queries`) of each sequence over up to `n_keys` cached ones. `b64_32k` is 64
-- sequences of 32,768 tokens; of `ragged` ones the lengths are drawn up to that. `paged` caches lie
-- in pages, and `sdpa` and `compiled` first gather them. "Share of the ceiling" is of the rate at
-- which PyTorch's sum reads 1 GiB on a GPU of the same model, which a longer read can surpass. A
-- plan is the host's, once for each composition of a batch, and no time has it.
select
    device,
    shape || ': ' || in_words(problem) || ' ' || dtype as shape,
    implementation as ours,
    time_ms as ms,
    format('{:.0f} %', 100 * share_of_roofline) as share_of_the_ceiling,
    others as "the_others,_ms",
    ratio_cell(speedup_best, speedup_best_low, speedup_best_high) as against_their_best,
    verdict_best as verdict,
    evidence_cell(valid, why_not) as evidence
from own_operators
where op = 'decode_attention'
order by device asc, config_id asc, implementation asc;
