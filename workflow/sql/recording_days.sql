-- Grain: view that a figure draws × device × comparison_key × origin: the first and the last day,
-- in UTC, on which the rows behind it were measured.
--
-- The rows are the runs that a median is over. Where nothing was timed they are the failed runs.
-- The key is the view's own: a run's name in `training_curves`, for example. The rows behind view
-- `ablation` include the code versions that its components were compared with, which need not be
-- current.
create or replace view recording_days as
with used as (
    select * from measurements
    where kind != 'prediction'
    qualify is_used or not bool_or(is_used) over (partition by device, code_version)
),

keys as (
    select
        unnest(case
            when kind = 'operator' then ['roofline']
            when optimizer then ['speedup', 'matrix', 'memory']
            else ['memory']
        end) as view_name,
        device,
        comparison_key
    from summaries
    where
        study is distinct from 'ablation'
        and timing is distinct from 'latency'
        and implementation is distinct from 'auto'
        and (op is null or not is_ceiling(op))
    union all
    select
        'ablation' as view_name,
        device,
        comparison_key
    from summaries
    where list_contains(studies, 'ablation') and regexp_matches(variant, '^(only|without)_')
),

compared as (
    select
        case figure when 'ablation' then figure else 'equal_things' end as view_name,
        device,
        unnest([split_part(own, ' ', 1), split_part(base, ' ', 1)]) as code_version
    from contrasts
    where figure = 'ablation' or (figure = 'noise' and has_evidence)
),

measured as (
    select
        view_name,
        device,
        comparison_key,
        origin,
        recorded_at
    from keys
    inner join used using (device, comparison_key)
    where is_current
    union all
    select
        view_name,
        device,
        comparison_key,
        origin,
        recorded_at
    from compared
    inner join used using (device, code_version)
    union all
    select
        'stage_share' as view_name,
        device,
        comparison_key,
        origin,
        recorded_at
    from used
    where
        is_current
        and (device, comparison_key) in (select (device, comparison_key) from stage_share)
        and (device, run, config_id) in (select (device, run, config_id) from stg_stages)
    union all
    select
        'language_models' as view_name,
        device,
        comparison_key,
        origin,
        recorded_at
    from used
    where is_current and kind = 'generation'
    union all
    select
        'training_curves' as view_name,
        device,
        run as comparison_key,
        origin,
        recorded_at
    from stg_training
    union all
    select
        'host' as view_name,
        device,
        problem as comparison_key,
        calls.origin,
        calls.recorded_at
    from host
    inner join stg_host_calls as calls
        using (device, op, problem, pass, with_launches, implementation)
    where
        calls.status = 'ok'
        and calls.recorded_at between host.first_recorded_at and host.recorded_at
    union all
    select
        'step_host' as view_name,
        device,
        step_host.shape as comparison_key,
        steps.origin,
        steps.recorded_at
    from step_host
    inner join stg_host_steps as steps
        using (device, batch, n_context, n_target, dtype, variant, cuda_graph)
    where
        steps.status = 'ok'
        and steps.recorded_at between step_host.first_recorded_at and step_host.recorded_at
    union all
    select
        'profiled_passes' as view_name,
        device,
        problem as comparison_key,
        origin,
        recorded_at
    from profiled_passes
    inner join stg_profiles using (device, op, problem, implementation, pass, recorded_at)
)

select
    view_name,
    device,
    comparison_key,
    origin,
    cast(min(recorded_at) at time zone 'UTC' as date) as first_day,
    cast(max(recorded_at) at time zone 'UTC' as date) as last_day
from measured
group by view_name, device, comparison_key, origin;
