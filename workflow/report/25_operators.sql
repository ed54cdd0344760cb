-- topic: operators
-- # The other operators
-- Each row has ours beside the fastest of the others. The operators are those around attention in
-- the model, and some of language models and kernel exercises.
--
-- `torch` is PyTorch's plain form, and `eager` the formula in its single operations. `compiled` is
-- the plain form under `torch.compile`, and `compiled_autotuned` the same with a search for the
-- fastest code. `loop`, `bmm` and `grouped_mm` are other ways that PyTorch can compute the heads.
-- `addmm_activation` is cuBLAS with GELU in its epilogue, which has no backward pass. `quack` and
-- `liger` are packages. `two_kernels` is our RMSNorm and then our SwiGLU.
--
-- The measured rate is that of a large matmul, a memory copy or a sum that only reads, on this GPU,
-- whichever binds. It is no bound: a faster kernel has a share above 100 %.
--
-- A row with evidence and without a ratio was not timed beside its fastest peer.
-- [docs/limits.md](../docs/limits.md) has a case where `torch.compile` chose differently on two
-- machines.
select
    device,
    op as operator,
    pass,
    shape || coalesce(', ' || (problem ->> '$.options.bits') || ' bits', '') as shape,
    implementation as ours,
    time_ms as ms,
    tflops as "TFLOP/s",
    format('{:.0f} %', 100 * share_of_roofline) as share_of_measured_rate,
    others as "the_others,_ms",
    ratio_cell(speedup_best, speedup_best_low, speedup_best_high) as against_their_best,
    verdict_best as verdict,
    evidence_cell(valid, why_not) as evidence
from own_operators
where op not in ('attention', 'decode_attention')
order by device asc, op asc, pass desc, shape asc, implementation asc, comparison_key asc;
