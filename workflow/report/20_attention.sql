-- topic: attention
-- # Attention
-- The problem has 8 heads of 64 in bfloat16. A shape is tasks × (queries × keys). All
-- implementations of a shape are timed in turn in one process, with cold caches.
--
-- `fused` and `separate` are ours and share the forward kernel. `separate` has gradients that are
-- equal from run to run. `sdpa_flash` and `sdpa_cudnn` are backends of PyTorch's
-- `scaled_dot_product_attention`, and `flex` is its `flex_attention`. `fa3` and `fa4` are the
-- packages FlashAttention-3 (forward only) and FlashAttention-4.
--
-- The ratio is the time of the fastest other over ours, in runs that timed both. TFLOP/s count 4 ·
-- tasks · heads · queries · keys · 64 operations forward, and 2.5 times as many backward.
--
-- The measured rate is that of a large matmul or of a memory copy on this GPU, whichever binds. It
-- is below the datasheet's, and no bound: a kernel that is faster than that matmul or copy has a
-- share above 100 %.
select
    device,
    pass,
    format('{}: {} × ({:,} × {:,})', shape, batch, n_q, n_k) as shape,
    implementation as ours,
    time_ms as ms,
    tflops as "TFLOP/s",
    format('{:.0f} %', 100 * share_of_roofline) as share_of_measured_rate,
    others as "the_others,_ms",
    ratio_cell(speedup_best, speedup_best_low, speedup_best_high) as against_their_best,
    verdict_best as verdict,
    evidence_cell(valid, why_not) as evidence
from own_operators
where op = 'attention' and n_q is not null
order by
    device asc, pass desc, batch::bigint * n_q * n_k asc, shape asc, implementation asc,
    comparison_key asc;
