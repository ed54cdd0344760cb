-- Grain: device × config_id: peak memory of a step; the baseline is plain sdpa_flash.
-- The ablation's steps are left out.
create or replace view memory as
with baselines as (
    select
        device,
        shape,
        batch,
        n_context,
        n_target,
        dtype,
        optimizer,
        max(peak_memory_bytes) as baseline_peak_memory_bytes
    from step_summary
    where variant = 'sdpa_flash' and not checkpoint and not cuda_graph
    group by all
)

select
    device,
    config_id,
    study,
    shape,
    variant,
    batch,
    n_context,
    n_target,
    dtype,
    checkpoint,
    cuda_graph,
    optimizer,
    status,
    reason,
    peak_memory_bytes,
    peak_memory_bytes / pow(2, 30) as peak_memory_gib,
    baseline_peak_memory_bytes / pow(2, 30) as baseline_peak_memory_gib,
    peak_memory_bytes / baseline_peak_memory_bytes as relative_to_baseline
from step_summary
left join baselines using (device, shape, batch, n_context, n_target, dtype, optimizer)
where study != 'ablation';
