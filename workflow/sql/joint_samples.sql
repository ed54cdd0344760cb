-- Grain: device × shape × variant × dtype: milliseconds of a target of a joint sample and of a
-- training step, of a model with a buffer and without one, medians over the newest runs of the
-- highest standing.
--
-- Forms take turns in a run, so that runs count as a whole, as in view `predictions_over_context`.
-- `drawn_ms` is a sample's time over its targets, `anew_ms` that of one target whose context is
-- encoded for it alone, over as many points as the targets see in the mean; both are of all samples
-- of the batch. `sampling_speedup` is how many times as fast a sample is through the buffer, and
-- `training_cost` how many times as long a training step takes.
create or replace view joint_samples as
with runs as (
    select
        device,
        shape,
        variant,
        dtype,
        batch,
        n_context,
        n_target,
        run,
        bool_and(coalesce(counts, false)) as counts,
        min(why_not) as why_not,
        median(time_ms_p50) filter (where form = 'drawn') as drawn_ms,
        median(time_ms_p50) filter (where form = 'drawn_anew') as anew_ms,
        median(time_ms_p50) filter (where form = 'trained') as trained_ms,
        median(time_ms_p50) filter (where form = 'trained_plain') as plain_ms,
        max(recorded_at) as recorded_at
    from judged_predictions
    where study = 'joint' and is_current and outcome = 'ok'
    group by all
),

best as (
    select * from runs
    qualify
        standing('ok', counts) = max(standing('ok', counts))
            over (partition by device, shape, variant, dtype)
)

select
    device,
    shape,
    variant,
    dtype,
    batch,
    n_context,
    n_target,
    bool_and(counts) as counts,
    min(why_not) as why_not,
    median(columns('.+_ms')),
    median(anew_ms) / median(drawn_ms) as sampling_speedup,
    median(trained_ms) / median(plain_ms) as training_cost,
    count(*) as n_runs,
    max(recorded_at) as recorded_at
from best
group by all;
