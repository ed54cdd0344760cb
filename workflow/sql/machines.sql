-- Grain: environment_id: the GPU, the versions and the commit that its rows were measured with.
-- `gpu` is the GPU's UUID, or the device where that was not recorded.
create or replace view machines as
select
    environment_id,
    any_value(coalesce(gpu_uuid, device)) as gpu,
    any_value(torch) as torch,
    any_value(triton) as triton,
    any_value(git_commit) as git_commit
from environments
group by environment_id;
