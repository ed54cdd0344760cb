-- topic: evidence
-- # When, and on which machine
-- A session is a series of runs on one GPU without a gap of more than half an hour. Sessions
-- without the GPU's own number were recorded before evidence was kept. Commit names the code that
-- ran. Packages are the packages other than PyTorch and Triton that implementations came from.
-- Sessions without timings are left out.
with machines_of_runs as (
    select distinct
        device,
        run,
        environment_id
    from measurements
),

packages as (
    select
        environment_id,
        string_agg(distinct name || ' ' || hash, ', ' order by name || ' ' || hash) as versions
    from code inner join code_parts using (code_set)
    where part = 'package' and name not in ('torch', 'triton', 'cudnn')
    group by environment_id
)

select
    any_value(device_name) as gpu,
    any_value(left(gpu_uuid, 12)) as gpu_number,
    strftime(min(started_at) at time zone 'UTC', '%Y-%m-%d %H:%M') as "began,_UTC",
    count(distinct run) as runs,
    string_agg(distinct torch, ', ' order by torch) as torch,
    string_agg(distinct triton, ', ' order by triton) as triton,
    string_agg(distinct cuda, ', ' order by cuda) as cuda,
    string_agg(distinct cudnn, ', ' order by cudnn) as cudnn,
    string_agg(distinct driver, ', ' order by driver) as driver,
    string_agg(distinct left(git_commit, 7), ', ' order by left(git_commit, 7)) as commits,
    max_by(versions, length(versions)) as packages
from sessions
left join machines_of_runs using (device, run)
left join environments using (device, environment_id)
left join packages using (environment_id)
group by device, session
having count(environment_id) > 0
order by min(started_at) desc;
