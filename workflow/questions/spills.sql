-- Which kernels spill registers? The newest compilation of each: 0 spills none, 255 is the limit.
select kernel, target, dtype, spill_bytes, registers, launch_config, warnings
from kernels
qualify row_number() over (
    partition by kernel, target, dtype, launch_config order by recorded_at desc
) = 1
order by spill_bytes desc nulls last, registers desc nulls last, kernel asc, launch_config asc
limit 20;
