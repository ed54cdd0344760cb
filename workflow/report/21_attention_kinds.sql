-- # Attention of other kinds
-- Heads of language models: causal, with a sliding window, several sequences packed into one, and
-- fewer heads of keys than of queries (`n_kv_heads`); the same without a mask; sizes of kernel
-- exercises. `base2` is what a layer of the neural process asks for: its q carries the scale.
-- Names are as in the table above. `fa4_deterministic` has gradients that are equal from run to
-- run, as `separate` has. `wmma` and `cute` are CUDA C++ to learn from. For each pair of
-- a query and a key that it sees, and each dimension of each head, TFLOP/s count 4 operations
-- forward and 10 backward. A row without a ratio was timed in another run than its fastest peer.
select
    device,
    pass,
    shape || ': ' || in_words(problem) || ' ' || dtype as shape,
    implementation as ours,
    time_ms as ms,
    tflops as "TFLOP/s",
    others as "the_others,_ms",
    ratio_cell(speedup_best, speedup_best_low, speedup_best_high) as against_their_best,
    verdict_best as verdict,
    evidence_cell(valid, why_not) as evidence
from own_operators
where op = 'attention' and n_q is null and config_id not like 'untuned--%'
order by device asc, pass desc, config_id asc, implementation asc;
