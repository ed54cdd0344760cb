-- Grain: device × comparison_key: a step's peak memory, beside the specification's step without
-- switches. The ablation's steps are left out.
create or replace view memory as
with baselines as (
    select
        device,
        batch,
        n_context,
        n_target,
        dtype,
        optimizer,
        max(peak_memory_bytes) as baseline_peak_memory_bytes
    from step_summary
    where role = 'baseline' and not checkpoint and not cuda_graph
    group by all
)

select
    * exclude (
        code_version, studies, gated, n_runs, n_failed, step_ms, step_ms_low, step_ms_high,
        tokens_per_s, energy_j, tflops, mfu, throttled, environment_id, operators, gates,
        baseline_peak_memory_bytes
    ),
    peak_memory_bytes / pow(2, 30) as peak_memory_gib,
    baseline_peak_memory_bytes / pow(2, 30) as baseline_peak_memory_gib,
    peak_memory_bytes / baseline_peak_memory_bytes as relative_to_baseline
from step_summary
left join baselines using (device, batch, n_context, n_target, dtype, optimizer)
where study != 'ablation';
