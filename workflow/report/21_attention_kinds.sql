-- topic: attention
-- # Attention of other kinds
-- These are heads of language models: causal, with a sliding window, with several sequences packed
-- into one, and with fewer heads of keys than of queries (`n_kv_heads`). Some have no mask, and
-- some are sizes of kernel exercises.
--
-- `base2` is the form that a layer of the neural process asks for: its q carries the scale.
-- `fa4_deterministic` has gradients that are equal from run to run, like `separate`. `wmma` and
-- `cute` are CUDA C++ to learn from. Other names are as in the table above.
--
-- For each visible pair of query and key, and each dimension of each head, TFLOP/s count 4
-- operations forward and 10 backward. The measured rate is as in the table above: a kernel above
-- 100 % is faster than a large matmul. A row without a ratio was not timed beside its fastest peer.
select
    device,
    pass,
    shape || ': ' || in_words(problem) || ' ' || dtype as shape,
    implementation as ours,
    time_ms as ms,
    tflops as "TFLOP/s",
    format('{:.0f} %', 100 * share_of_roofline) as share_of_measured_rate,
    others as "the_others,_ms",
    ratio_cell(speedup_best, speedup_best_low, speedup_best_high) as against_their_best,
    verdict_best as verdict,
    evidence_cell(valid, why_not) as evidence
from own_operators
where op = 'attention' and n_q is null and config_id not like 'untuned--%'
order by device asc, pass desc, config_id asc, implementation asc, comparison_key asc;
