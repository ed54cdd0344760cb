-- Which kernels spill registers? The newest compilation of each; most spilled bytes first.
select kernel, target, dtype, launch_config, registers, spill_bytes, warnings
from kernels
qualify row_number() over (
    partition by kernel, target, dtype, launch_config order by recorded_at desc
) = 1
order by spill_bytes desc nulls last, registers desc
limit 20;
