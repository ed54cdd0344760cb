-- topic: decoding
-- # Decoding
-- New tokens (`n_queries`) of each sequence read up to `n_keys` cached ones. `b64_32k` is 64
-- sequences of 32,768 tokens. In `ragged` problems the lengths are drawn up to that number. `paged`
-- caches lie in pages; `sdpa` and `compiled` first gather them.
--
-- The measured rate is that at which PyTorch's sum reads 1 GiB on a GPU of this model. A longer
-- read can be faster, with a share above 100 %.
--
-- A plan is made on the host, once for each composition of a batch. Planning time is not part of
-- the time.
select
    device,
    shape || ': ' || in_words(problem) || ' ' || dtype as shape,
    implementation as ours,
    time_ms as ms,
    format('{:.0f} %', 100 * share_of_roofline) as share_of_measured_rate,
    others as "the_others,_ms",
    ratio_cell(speedup_best, speedup_best_low, speedup_best_high) as against_their_best,
    verdict_best as verdict,
    evidence_cell(valid, why_not) as evidence
from own_operators
where op = 'decode_attention'
order by device asc, config_id asc, implementation asc, comparison_key asc;
