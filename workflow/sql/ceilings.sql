-- Grain: device × op × dtype: the rate that the device reached in each ceiling, as a median over
-- the valid runs. A matmul's dtype is the number format of its products, such as "e4m3".
create or replace view format_ceilings as
select
    device,
    op,
    dtype,
    max(flops / (time_ms * 1e9)) as tflops,
    max(bytes / (time_ms * 1e6)) as gb_per_s
from summaries
where is_ceiling(op) and status = 'ok' and valid is distinct from false
group by device, op, dtype;

-- Grain: device: the rates that it reached in a large matmul in 16 bits (in float32, if no other
-- was timed), in a memory copy, and in a sum that only reads.
create or replace view ceilings as
with rates as (
    select
        device,
        op,
        coalesce(dtype, 'bfloat16') as dtype,
        flops / (time_ms * 1e9) as tflops,
        bytes / (time_ms * 1e6) as gb_per_s
    from summaries
    where is_ceiling(op) and status = 'ok' and valid is distinct from false
)

select
    device,
    coalesce(
        max(tflops) filter (where op = 'ceiling_matmul' and dtype = 'bfloat16'),
        max(tflops) filter (where op = 'ceiling_matmul' and dtype = 'float16'),
        max(tflops) filter (where op = 'ceiling_matmul' and dtype = 'float32')
    ) as ceiling_tflops,
    max(gb_per_s) filter (where op = 'ceiling_copy') as ceiling_gb_per_s,
    max(gb_per_s) filter (where op = 'ceiling_read') as ceiling_read_gb_per_s
from rates
group by device;
