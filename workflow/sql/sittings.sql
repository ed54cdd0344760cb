-- Grain: device × run: the sitting that each run belongs to.
--
-- A run is one process. A sitting is a series of runs on one GPU, in order of time, without a gap
-- of more than 30 minutes. `started_at` is the run's first `recorded_at`.
create or replace table sittings as
with rows_of_runs as (
    from gates
    union all by name
    from steps
    union all by name
    from ops
    union all by name
    from predictions
    union all by name
    from training
    union all by name
    from trials
),

runs as (
    select
        device,
        run_of(run_id, device, recorded_at) as run,
        any_value(coalesce(gpu, device)) as gpu,
        min(recorded_at) as started_at
    from rows_of_runs
    left join machines using (environment_id)
    group by all
),

gaps as (
    select
        *,
        lag(started_at) over of_gpu as previous_at,
        case
            when previous_at >= started_at - interval 30 minutes then null else started_at
        end as sitting_started_at
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
            max(sitting_started_at) over (partition by gpu order by started_at, run),
            '%Y-%m-%dT%H:%M:%SZ'
        )
    ) as sitting
from gaps;
