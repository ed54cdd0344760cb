-- Grain: a recorded stage of a step, measured on the device, with its run. Early rows without a
-- source hold the host's time too and are left out.
create or replace view stg_stages as
select
    *,
    run_of(run_id, device, recorded_at) as run
from stages
where source = 'profiler';

-- Grain: a kernel that Nsight Compute profiled, with its run.
create or replace view stg_profiles as
select
    *,
    run_of(run_id, device, recorded_at) as run
from profiles;

-- Grain: a recorded host time of an eager call, with the commit that it was measured at.
create or replace view stg_host_calls as
select
    host_calls.*,
    git_commit
from host_calls
left join stg_environments using (environment_id);

-- Grain: a recorded host time of a training step, with the commit and the processor.
create or replace view stg_host_steps as
select
    host_steps.*,
    git_commit,
    processor,
    cpu_count,
    cpu_limit
from host_steps
left join stg_environments using (environment_id);

-- Grain: device × run × environment_id: when each run of any table recorded its first row.
create or replace view stg_runs as
with recorded as (
    from gates
    union all by name
    from steps
    union all by name
    from ops
    union all by name
    from predictions
    union all by name
    from generations
    union all by name
    from training
    union all by name
    from trials
)

select
    device,
    run_of(run_id, device, recorded_at) as run,
    environment_id,
    min(recorded_at) as recorded_at
from recorded
group by all;
