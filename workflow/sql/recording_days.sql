-- Grain: view that a figure draws × device × question × origin: between which days the rows behind
-- it were measured, in UTC.
--
-- They are the runs that a median is over, or where nothing was timed those that failed. `question`
-- is a run's name in `training_curves`. Of view `ablation` they include the generations that its
-- components were compared with, which need not be current.
create or replace view recording_days as
with origins as (
    select
        device,
        run_of(run_id, device, recorded_at) as run,
        config_id,
        'step' as pass,
        origin
    from steps
    union
    select
        device,
        run_of(run_id, device, recorded_at) as run,
        config_id,
        pass,
        origin
    from ops
),

used as (
    select
        device,
        question,
        generation,
        is_current,
        run,
        config_id,
        counts,
        recorded_at,
        origin
    from evidence
    inner join origins using (device, run, config_id, pass)
    qualify
        coalesce(
            standing(status, counts)
            = max(standing(status, counts)) over (partition by device, generation),
            max(standing(status, counts)) over (partition by device, generation) is null
        )
),

drawn as (
    select
        unnest(['speedup', 'matrix']) as view_name,
        device,
        question
    from speedup
    union
    select
        'memory' as view_name,
        device,
        question
    from memory
    union
    select
        'roofline' as view_name,
        device,
        question
    from roofline
    where not is_ceiling(op)
    union
    select
        'ablation' as view_name,
        device,
        question
    from current_steps
    where study = 'ablation' and regexp_matches(variant, '^(only|without)_')
),

compared as (
    select
        case figure when 'ablation' then figure else 'equal_things' end as view_name,
        device,
        unnest([split_part(own, ' ', 1), split_part(base, ' ', 1)]) as generation
    from contrasts
    where figure = 'ablation' or (figure = 'noise' and has_evidence)
),

measured as (
    select
        view_name,
        device,
        question,
        origin,
        recorded_at
    from drawn
    inner join used using (device, question)
    where is_current
    union all
    select
        view_name,
        device,
        question,
        origin,
        recorded_at
    from compared
    inner join used using (device, generation)
    union all
    select
        'stage_share' as view_name,
        used.device,
        used.question,
        used.origin,
        used.recorded_at
    from used
    where
        used.is_current
        and (used.device, used.question) in (select (device, question) from stage_share)
        and (used.device, used.run, used.config_id) in (
            select (device, run_of(run_id, device, recorded_at), config_id) from stages
            where source = 'profiler'
        )
    union all
    select
        'training_curves' as view_name,
        device,
        run as question,
        origin,
        recorded_at
    from current_training
    union all
    select
        'host' as view_name,
        host.device,
        host.problem as question,
        host_calls.origin,
        host_calls.recorded_at
    from host
    inner join host_calls using (device, op, problem, pass, with_launches, implementation)
    where
        host_calls.status = 'ok'
        and host_calls.recorded_at between host.first_recorded_at and host.recorded_at
    union all
    select
        'step_host' as view_name,
        device,
        step_host.shape as question,
        host_steps.origin,
        host_steps.recorded_at
    from step_host
    inner join host_steps using (device, batch, n_context, n_target, dtype, variant, cuda_graph)
    where
        host_steps.status = 'ok'
        and host_steps.recorded_at between step_host.first_recorded_at and step_host.recorded_at
    union all
    select
        'profiled_passes' as view_name,
        device,
        problem as question,
        origin,
        profiles.recorded_at
    from profiled_passes
    inner join profiles using (device, op, problem, implementation, pass, recorded_at)
)

select
    view_name,
    device,
    question,
    origin,
    cast(min(recorded_at) at time zone 'UTC' as date) as first_day,
    cast(max(recorded_at) at time zone 'UTC' as date) as last_day
from measured
group by view_name, device, question, origin;
