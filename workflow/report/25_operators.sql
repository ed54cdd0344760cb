-- # The other operators
-- Ours beside the fastest of the others, as in the table of attention: what stands around it in the
-- model, and operators beyond the model at sizes of language models and of kernel exercises.
-- `torch` is PyTorch's plain form, `compiled` the same under `torch.compile`; `loop`, `bmm` and
-- `grouped_mm` are other ways that PyTorch can do the heads. `addmm_activation` is cuBLAS with GELU
-- in its epilogue, which has no backward pass. `quack` and `liger` are packages. Embedding and
-- projections have gates and no benchmark of their own; the ablation times them.
-- Where a row has evidence and no ratio, the fastest of the others was not timed beside it.
-- `torch.compile` does not choose alike on every machine: DESIGN.md, "Known limits", has a case.
select
    device,
    op as operator,
    pass,
    shape,
    implementation as ours,
    time_ms as ms,
    tflops as "TFLOP/s",
    others as "the_others,_ms",
    ratio_cell(speedup_best, speedup_best_low, speedup_best_high) as against_their_best,
    verdict_best as verdict,
    evidence_cell(valid, why_not) as evidence
from own_operators
where op not in ('attention', 'decode_attention')
order by device asc, op asc, pass desc, shape asc, implementation asc;
