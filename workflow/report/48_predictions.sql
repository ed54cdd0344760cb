-- # Predictions over one context
-- The table has milliseconds of one prediction among many in a row, timed in turn. "Anew" encodes
-- the context each time. "Kept" reads the result of `encode`. "Replayed" is the same with
-- `cuda_graph=True`. "Bare" is the targets' work alone, in a CUDA graph. "A hundred" says how many
-- times as fast as anew a hundred replayed predictions are, encoding and capture included. "Off by"
-- is the difference from an encoding made anew, in float32, relative to the largest mixture
-- parameter.
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
