-- Grain: environment_id: the GPU, the host's processor, the versions and the commit that its rows
-- were measured with. `cpu_count` is of processors that the process may use, `cpu_limit` how many
-- processors' time its control group allows, null where it sets no limit.
-- `gpu` is the GPU's UUID, or the device where that was not recorded.
create or replace view machines as
select
    environment_id,
    any_value(coalesce(gpu_uuid, device)) as gpu,
    any_value(torch) as torch,
    any_value(triton) as triton,
    any_value(git_commit) as git_commit,
    any_value(processor) as processor,
    any_value(cpu_count) as cpu_count,
    any_value(cpu_limit) as cpu_limit
from environments
group by environment_id;
