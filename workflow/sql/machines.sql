-- Grain: environment_id: the GPU and the versions that rows of this environment were measured with.
-- `gpu` is the GPU's UUID, or the device where that was not recorded.
create or replace view machines as
select
    environment_id,
    any_value(coalesce(gpu_uuid, device)) as gpu,
    any_value(torch) as torch,
    any_value(triton) as triton
from environments
group by environment_id;
