-- topic: steps
-- # Memory at the largest shape
-- Peak memory of one step with 200,000 context points, smallest first. With checkpointing, a
-- transformer block keeps only its input and computes the rest again.
select
    device,
    variant,
    products_in,
    checkpoint as checkpointing,
    peak_memory_bytes / pow(2, 30) as "memory,_GiB",
    step_ms as "step,_ms",
    evidence_cell(valid, why_not) as evidence
from step_summary
where n_context >= 200000 and optimizer and status = 'ok'
order by device, peak_memory_bytes, variant;
