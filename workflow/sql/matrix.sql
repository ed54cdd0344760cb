-- Grain: device × shape × variant: every combination of switches side by side. A failed one has
-- its status, one that was not run is null. Streams whose sizes vary are left out.
create or replace view matrix as
with cells as (
    select
        speedup.*,
        peak_memory_gib,
        case
            when speedup.checkpoint and speedup.cuda_graph then 'checkpoint_cuda_graph'
            when speedup.checkpoint then 'checkpoint'
            when speedup.cuda_graph then 'cuda_graph'
            else 'plain'
        end as cell
    from speedup
    inner join memory using (device, question)
    where not speedup.varies
)

pivot cells
on cell in ('plain', 'checkpoint', 'cuda_graph', 'checkpoint_cuda_graph')
using
any_value(step_ms) as step_ms,
any_value(peak_memory_gib) as peak_memory_gib,
any_value(speedup) as speedup,
any_value(verdict) as verdict,
any_value(fastest) as fastest,
any_value(why_no_speedup) as why_no_speedup,
any_value(counts) as counts,
any_value(why_not) as why_not,
any_value(status) as status
group by device, shape, batch, n_context, n_target, dtype, variant, role;
