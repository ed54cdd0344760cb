-- Grain: device × run: the session that each run belongs to.
--
-- A run is one process. A session is a series of runs on one GPU, in order of time, without a gap
-- of more than 30 minutes. `started_at` is the run's first `recorded_at`.
create or replace table sessions as
with runs as (
    select
        device,
        run,
        any_value(coalesce(gpu, device)) as gpu,
        min(recorded_at) as started_at
    from stg_runs
    left join stg_environments using (environment_id)
    group by all
),

gaps as (
    select
        *,
        lag(started_at) over of_gpu as previous_at,
        case
            when previous_at >= started_at - interval 30 minutes then null else started_at
        end as session_started_at
    from runs
    window of_gpu as (partition by gpu order by started_at, run)
)

select
    device,
    gpu,
    run,
    started_at,
    concat(
        gpu,
        ' ',
        strftime(
            max(session_started_at) over (partition by gpu order by started_at, run),
            '%Y-%m-%dT%H:%M:%SZ'
        )
    ) as session
from gaps;
