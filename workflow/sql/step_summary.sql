-- Grain: device × config_id: medians over the replicates; null where one of them failed.
-- `reason` of a failure says why, of a timing what was odd. `mfu` is of the matmul ceiling.
create or replace view step_summary as
with intervals as (
    select
        device,
        config_id,
        quantile_cont(time_ms, 0.025) as step_ms_low,
        quantile_cont(time_ms, 0.975) as step_ms_high
    from resamples
    where pass = 'step'
    group by all
),

configurations as (
    select
        device,
        config_id,
        any_value(study) as study,
        any_value(shape) as shape,
        any_value(variant) as variant,
        any_value(batch) as batch,
        any_value(n_context) as n_context,
        any_value(n_target) as n_target,
        any_value(dtype) as dtype,
        any_value(checkpoint) as checkpoint,
        any_value(cuda_graph) as cuda_graph,
        any_value(optimizer) as optimizer,
        count(*) as n_replicates,
        case when bool_or(status = 'ok') then 'ok' else arg_max(status, recorded_at) end as status,
        coalesce(
            arg_max(reason, recorded_at) filter (where status = 'ok' and reason != ''),
            case when not bool_or(status = 'ok') then arg_max(reason, recorded_at) end
        ) as reason,
        median(step_ms_p50) as step_ms,
        median(tokens_per_s) as tokens_per_s,
        max(peak_memory_bytes) as peak_memory_bytes,
        median(tflops) as tflops,
        median(tflops) / any_value(ceiling_tflops) as mfu,
        bool_or(throttled) as throttled,
        bool_and(proven) as gate_passed,
        arg_max(environment_id, recorded_at) as environment_id,
        arg_max(operators, recorded_at) as operators,
        arg_max(gates, recorded_at) as gates
    from current_steps
    left join ceilings using (device)
    group by device, config_id
)

select
    configurations.* replace (
        case when status = 'ok' then step_ms end as step_ms,
        case when status = 'ok' then tokens_per_s end as tokens_per_s,
        case when status = 'ok' then peak_memory_bytes end as peak_memory_bytes,
        case when status = 'ok' then tflops end as tflops,
        case when status = 'ok' then mfu end as mfu
    ),
    case when status = 'ok' then step_ms_low end as step_ms_low,
    case when status = 'ok' then step_ms_high end as step_ms_high
from configurations
left join intervals using (device, config_id);
