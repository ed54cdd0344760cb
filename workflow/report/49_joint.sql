-- # Joint samples
-- The table has milliseconds of one target of a joint sample, for all tasks of the batch together.
-- "Through the buffer" is a whole sample's time over its number of targets, encodings and capture
-- included. "Anew" is one target of a context that is encoded for it alone, with half of the
-- targets in it; 20 of them in a row were timed. "Trained" is a training step of the same model,
-- and "plain" one of the model without a buffer, from runs of its own: compare within a row.
select
    device,
    format('{}: {} × ({:,}, {:,})', shape, batch, n_context, n_target) as shape,
    variant,
    anew_ms as anew,
    drawn_ms as through_the_buffer,
    round(sampling_speedup, 2) as anew_over_buffer,
    trained_ms as trained,
    plain_ms as plain,
    round(training_cost, 3) as trained_over_plain,
    n_runs as runs,
    evidence_cell(valid, why_not) as evidence
from joint_samples
order by device, shape, variant;
