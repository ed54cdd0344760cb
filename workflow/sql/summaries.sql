-- Grain: device × comparison_key: medians over the runs of the current code version, of every step
-- and operator but tuning trials and second contenders of an implementation.
--
-- Medians are over the rows that `is_used` marks in `measurements`; `valid` and `why_not` say which
-- these are. `status` and `reason` are a failure's where nothing was timed, and `n_failed` counts
-- the other failures. `_low` and `_high` are the shortest and the longest run. Peak memory is of
-- the newest run: host code changes it too, and is no part of a captured step's code version.
create or replace view summaries as
with runs as (
    select
        *,
        status = 'ok' as was_timed,
        coalesce(
            varies,
            -- The first rows of streams do not say it.
            max(padded_share) over (partition by device, shape, kind) > 0,
            false
        ) as is_stream,
        -- The first rows with `skip_unread` count work that was left out: they have no rate.
        case
            when
                coalesce(gates, '') not like '%skip_unread%'
                or tflops * median_ms < 0.999 * flops / 1e9
                then tflops * median_ms
        end as work
    from measurements
    where
        is_current
        and kind in ('step', 'operator')
        and forced is null
        and not coalesce(twin, false)
)

select
    device,
    comparison_key,
    any_value(columns([
        'kind', 'code_version', 'role', 'batch', 'dtype', 'variant', 'n_context',
        'n_target', 'checkpoint', 'cuda_graph', 'optimizer', 'op', 'pass', 'implementation', 'n_q',
        'n_k', 'n_heads', 'head_dim', 'd_model', 'd_ff', 'd_ff_storage', 'n_components', 'flops',
        'bytes', 'bytes_written', 'problem', 'timing', 'timing_hash', 'with_forward'
    ])),
    min(shape) as shape, -- two studies may name one problem differently
    -- Another package's step that failed does not know it.
    max(precision) as precision,
    min(config_id) as config_id,
    bool_or(is_stream) as varies,
    list(distinct study order by study) as studies,
    coalesce(min(study) filter (where study != 'ablation'), min(study)) as study,
    case when bool_or(was_timed) then 'ok' else arg_max(status, recorded_at) end as status,
    coalesce(
        arg_max(reason, recorded_at) filter (where is_used and reason != ''),
        arg_max(reason, recorded_at) filter (where reason != '')
    ) as reason,
    any_value(valid) filter (where is_used) as valid,
    any_value(gated) filter (where is_used) as gated,
    arg_max(why_not, recorded_at) filter (where is_used or not was_timed) as why_not,
    count(*) filter (where is_used) as n_runs,
    count(*) filter (where not was_timed) as n_failed,
    median(median_ms) filter (where is_used) as time_ms,
    min(median_ms) filter (where is_used) as time_ms_low,
    max(median_ms) filter (where is_used) as time_ms_high,
    median(columns([
        'time_ms_p95', 'time_ms_p99', 'plan_ms', 'tokens_per_s', 'energy_j', 'padded_share'
    ])) filter (where is_used),
    -- Early runs have no wall time. Beside a median over all runs, that of some would mislead.
    case
        when bool_and(step_ms_wall is not null) filter (where is_used)
            then median(step_ms_wall) filter (where is_used)
    end as step_ms_wall,
    min(n_samples) filter (where is_used) as n_samples,
    arg_max(peak_memory_bytes, recorded_at) filter (where was_timed) as peak_memory_bytes,
    arg_max(work, recorded_at) filter (where is_used) as work,
    bool_or(throttled) filter (where is_used) as throttled,
    arg_max(columns(['environment_id', 'operators', 'gates']), recorded_at)
from runs
group by device, comparison_key;
