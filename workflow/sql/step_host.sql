-- Grain: device × processor × sizes × dtype × variant × cuda_graph: milliseconds of the host for a
-- call of a training step, and of a step in a loop.
--
-- The times are medians over the runs of the newest commit that timed a form of these sizes, with
-- the newest model and meaning of the variant's name. All forms of a run took turns in one process.
-- `over_pytorch` divides host_ms by the host_ms of PyTorch's form with the fastest loop without a
-- graph. `over_graph` divides step_ms by the step_ms of the same variant as a CUDA graph. Both are
-- medians of the ratios of single runs. `waits_for_host`: a step of a loop takes at most a tenth
-- longer than its call alone.
create or replace view step_host as
with newest as (
    select * from stg_host_steps
    qualify
        git_commit is not distinct from arg_max(git_commit, (status = 'ok', recorded_at))
            over (partition by device, batch, n_context, n_target, dtype)
        and spec_hash is not distinct from arg_max(spec_hash, (status = 'ok', recorded_at))
            over (partition by device, batch, n_context, n_target, dtype, variant, cuda_graph)
),

compared as (
    select
        *,
        arg_min(variant, step_ms_p50) filter (where role <> 'own' and not cuda_graph)
            over (partition by run_id) as pytorch_variant,
        arg_min(host_ms_p50, step_ms_p50) filter (where role <> 'own' and not cuda_graph)
            over (partition by run_id) as base_host_ms,
        max(step_ms_p50) filter (where cuda_graph)
            over (partition by run_id, variant) as graph_step_ms
    from newest
)

select
    device,
    processor,
    any_value(cpu_count) as cpu_count,
    any_value(cpu_limit) as cpu_limit,
    any_value(shape) as shape,
    batch,
    n_context,
    n_target,
    dtype,
    variant,
    cuda_graph,
    any_value(role) as role,
    case when bool_or(status = 'ok') then 'ok' else any_value(status) end as status,
    case when not bool_or(status = 'ok') then any_value(reason) end as reason,
    median(host_ms_p50) as host_ms,
    median(step_ms_p50) as step_ms,
    median(step_ms_p50) <= 1.1 * median(host_ms_p50) as waits_for_host,
    any_value(pytorch_variant) as pytorch_variant,
    median(host_ms_p50 / base_host_ms) as over_pytorch,
    case when not cuda_graph then median(step_ms_p50 / graph_step_ms) end as over_graph,
    count(*) filter (where status = 'ok') as n_runs,
    min(recorded_at) as first_recorded_at,
    max(recorded_at) as recorded_at
from compared
group by device, processor, batch, n_context, n_target, dtype, variant, cuda_graph;
