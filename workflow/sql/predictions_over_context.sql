-- Grain: study × device × shape × variant × dtype × run: milliseconds of each form of predictions
-- or joint samples that one run timed. The forms take turns in a run, so a run is valid or used as
-- a whole.
create or replace view prediction_runs as
with runs as (
    select
        study = 'joint' as is_joint,
        columns(['device', 'shape', 'variant', 'dtype', 'batch', 'n_context', 'n_target']),
        run,
        bool_and(coalesce(valid, false)) as valid,
        min(why_not) as why_not,
        max(max_relative_error) as max_relative_error,
        median(median_ms) filter (where form = 'anew') as anew_ms,
        median(median_ms) filter (where form = 'encode') as encode_ms,
        median(median_ms) filter (where form = 'kept') as kept_ms,
        median(median_ms) filter (where form = 'replayed') as replayed_ms,
        median(median_ms) filter (where form = 'bare') as bare_ms,
        median(median_ms) filter (where form = 'drawn') as drawn_ms,
        median(median_ms) filter (where form = 'drawn_anew') as drawn_anew_ms,
        median(median_ms) filter (where form = 'trained') as trained_ms,
        median(median_ms) filter (where form = 'trained_plain') as trained_plain_ms,
        median(compile_s) filter (where form = 'replayed') as until_replayed_s,
        max(recorded_at) as recorded_at
    from measurements
    where kind = 'prediction' and is_current and status = 'ok'
    group by all
)

select * from runs
qualify valid = max(valid) over (partition by is_joint, device, shape, variant, dtype);

-- Grain: device × shape × variant × dtype: milliseconds of a prediction over one context, in the
-- forms of table `predictions`, as medians over the newest valid runs, or over all runs if no run
-- is valid.
--
-- `kept_speedup` and `replayed_speedup` are against encoding anew each time. `hundred_speedup` is
-- the speedup of a hundred replayed predictions. Their time includes the encoding and the two first
-- predictions, of which the second is captured: these take `until_replayed_s` seconds.
-- `replayed_over_bare` is how many times as long a replayed prediction takes as the targets' own
-- work.
create or replace view predictions_over_context as
with medians as (
    select
        columns(['device', 'shape', 'variant', 'dtype', 'batch', 'n_context', 'n_target']),
        bool_and(valid) as valid,
        min(why_not) as why_not,
        max(max_relative_error) as max_relative_error,
        median(columns([
            'anew_ms', 'encode_ms', 'kept_ms', 'replayed_ms', 'bare_ms', 'until_replayed_s'
        ])),
        count(*) as n_runs,
        max(recorded_at) as recorded_at
    from prediction_runs
    where not is_joint
    group by all
)

select
    *,
    anew_ms / kept_ms as kept_speedup,
    anew_ms / replayed_ms as replayed_speedup,
    100 * anew_ms / (encode_ms + 1000 * until_replayed_s + 98 * replayed_ms) as hundred_speedup,
    replayed_ms / bare_ms as replayed_over_bare
from medians;

-- Grain: device × shape × variant × dtype: milliseconds of one target of a joint sample and of a
-- training step, for a model with a buffer and without one, as medians over the same runs as in
-- view `predictions_over_context`.
--
-- `drawn_ms` is a sample's time over its number of targets. `anew_ms` is the time of one target
-- whose context is encoded for it alone, with as many points as the targets see in the mean. Both
-- are for all samples of the batch. `sampling_speedup` is how many times as fast a sample is
-- through the buffer, and `training_cost` how many times as long a training step takes.
create or replace view joint_samples as
select
    columns(['device', 'shape', 'variant', 'dtype', 'batch', 'n_context', 'n_target']),
    bool_and(valid) as valid,
    min(why_not) as why_not,
    median(columns(['drawn_ms', 'trained_ms'])),
    median(drawn_anew_ms) as anew_ms,
    median(trained_plain_ms) as plain_ms,
    median(drawn_anew_ms) / median(drawn_ms) as sampling_speedup,
    median(trained_ms) / median(trained_plain_ms) as training_cost,
    count(*) as n_runs,
    max(recorded_at) as recorded_at
from prediction_runs
where is_joint
group by all;
