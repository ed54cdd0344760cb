-- Which kernels spill registers? The newest compilation of each, those nearest to it first: 255
-- registers are the limit, and spill_bytes 0 means that none was spilled.
select kernel, target, dtype, spill_bytes, registers, launch_config, warnings
from kernels
qualify row_number() over (
    partition by kernel, target, dtype, launch_config order by recorded_at desc
) = 1
order by spill_bytes desc nulls last, registers desc nulls last, kernel asc, launch_config asc
limit 20;
