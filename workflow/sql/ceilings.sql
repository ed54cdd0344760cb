-- Grain: device: what it reached in a large matmul in 16 bits (in float32, where that is all), in a
-- memory copy, and in a sum that only reads; median over the runs.
create or replace view ceilings as
select
    device,
    coalesce(
        max(tflops) filter (
            where op = 'ceiling_matmul' and coalesce(dtype, 'bfloat16') = 'bfloat16'
        ),
        max(tflops) filter (where op = 'ceiling_matmul' and dtype = 'float16'),
        max(tflops) filter (where op = 'ceiling_matmul' and dtype = 'float32')
    ) as ceiling_tflops,
    max(gb_per_s) filter (where op = 'ceiling_copy') as ceiling_gb_per_s,
    max(gb_per_s) filter (where op = 'ceiling_read') as ceiling_read_gb_per_s
from format_ceilings
group by device;
