-- Grain: environment_id: the GPU, the processor, the versions and the commit that rows were
-- measured with.
create or replace view stg_environments as
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
