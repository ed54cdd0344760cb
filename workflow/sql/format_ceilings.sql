-- Grain: device × op × dtype: what it reached in each ceiling, median over the runs. Of a matmul
-- the dtype is the number format of its products, such as "e4m3".
create or replace view format_ceilings as
with medians as (
    select
        device,
        question,
        any_value(op) as op,
        any_value(dtype) as dtype,
        any_value(flops) / (median(time_ms_p50) * 1e9) as tflops,
        any_value(bytes) / (median(time_ms_p50) * 1e6) as gb_per_s
    from current_ops
    where
        is_ceiling(op)
        and status = 'ok'
        and counts is distinct from false
        and not coalesce(twin, false)
    group by device, question
)

select
    device,
    op,
    dtype,
    max(tflops) as tflops,
    max(gb_per_s) as gb_per_s
from medians
group by device, op, dtype;
