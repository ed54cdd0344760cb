-- Grain: device × shape × variant × dtype: milliseconds of a prediction over one context, in the
-- forms of table `predictions`, medians over the newest runs of the highest standing.
--
-- Forms take turns in a run, so that runs count as a whole: `counts` where every form that was
-- timed counts (view `evidence`), and `why_not` says why not. `kept_speedup` and `replayed_speedup`
-- are against encoding anew each time. `hundred_speedup` is of a hundred predictions, the encoding
-- counted among those that are replayed, and before the first of them `until_replayed_s`, seconds
-- of two predictions of which the second is captured. `replayed_over_bare`: how many times as long
-- as the targets' own work.
create or replace view predictions_over_context as
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
        max(max_relative_error) as max_relative_error,
        median(time_ms_p50) filter (where form = 'anew') as anew_ms,
        median(time_ms_p50) filter (where form = 'encode') as encode_ms,
        median(time_ms_p50) filter (where form = 'kept') as kept_ms,
        median(time_ms_p50) filter (where form = 'replayed') as replayed_ms,
        median(time_ms_p50) filter (where form = 'bare') as bare_ms,
        median(compile_s) filter (where form = 'replayed') as until_replayed_s,
        max(recorded_at) as recorded_at
    from judged_predictions
    where study != 'joint' and is_current and outcome = 'ok'
    group by all
),

best as (
    select * from runs
    qualify
        standing('ok', counts) = max(standing('ok', counts))
            over (partition by device, shape, variant, dtype)
),

medians as (
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
        max(max_relative_error) as max_relative_error,
        median(columns('.+_(ms|replayed_s)')),
        count(*) as n_runs,
        max(recorded_at) as recorded_at
    from best
    group by all
)

select
    *,
    anew_ms / kept_ms as kept_speedup,
    anew_ms / replayed_ms as replayed_speedup,
    100 * anew_ms / (encode_ms + 1000 * until_replayed_s + 98 * replayed_ms) as hundred_speedup,
    replayed_ms / bare_ms as replayed_over_bare
from medians;
