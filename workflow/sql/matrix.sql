-- Grain: device × shape × variant: a step with and without checkpointing and a CUDA graph,
-- side by side. A failed step has its status, and one that was not run is null. Streams of varying
-- sizes are left out.
create or replace view matrix as
with cells as (
    select
        *,
        peak_memory_bytes / pow(2, 30) as peak_memory_gib,
        coalesce(nullif(concat_ws(
            '_',
            case when checkpoint then 'checkpoint' end,
            case when cuda_graph then 'cuda_graph' end
        ), ''), 'plain') as cell
    from speedup
    where not varies
)

pivot cells
on cell in ('plain', 'checkpoint', 'cuda_graph', 'checkpoint_cuda_graph')
using
any_value(step_ms) as step_ms,
any_value(tokens_per_s) as tokens_per_s,
any_value(peak_memory_gib) as peak_memory_gib,
any_value(speedup) as speedup,
any_value(verdict) as verdict,
any_value(fastest) as fastest,
any_value(winner) as winner,
any_value(why_no_speedup) as why_no_speedup,
any_value(valid) as valid,
any_value(why_not) as why_not,
any_value(status) as status
group by device, shape, batch, n_context, n_target, dtype, precision, products_in, variant, role;
