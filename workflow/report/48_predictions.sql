-- # Predictions over one context
-- Milliseconds of one prediction among many in a row, timed in turn. "Anew" encodes the context
-- each time, "kept" reads what `encode` has kept, "replayed" is the same with `cuda_graph=True`,
-- and "bare" is the targets' own work, a CUDA graph with nothing around it. "A hundred" says how
-- many times as fast as anew a hundred predictions are that are replayed, with the encoding and
-- the capture. "Off by" is the difference from what an encoding made anew gives, in float32, of the
-- largest mixture parameter.
select
    device,
    format('{}: {} × ({:,}, {:,})', shape, batch, n_context, n_target) as shape,
    variant,
    anew_ms as anew,
    encode_ms as encode,
    kept_ms as kept,
    replayed_ms as replayed,
    bare_ms as bare,
    format('{:.2f}', kept_speedup) as anew_over_kept,
    format('{:.2f}', replayed_speedup) as anew_over_replayed,
    format('{:.2f}', replayed_over_bare) as replayed_over_bare,
    format('{:.2f}', hundred_speedup) as a_hundred,
    max_relative_error as off_by,
    evidence_cell(valid, why_not) as evidence
from predictions_over_context
order by device asc, batch * n_context desc, variant asc;
