-- Grain: device: what it reached in a large matmul and in a memory copy, median over the runs.
create or replace view ceilings as
with medians as (
    select
        device,
        question,
        any_value(op) as op,
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
    max(tflops) filter (where op = 'ceiling_matmul') as ceiling_tflops,
    max(gb_per_s) filter (where op = 'ceiling_copy') as ceiling_gb_per_s
from medians
group by device;
