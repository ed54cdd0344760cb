-- Grain: device × question, of one pass of an operator: what a single launch takes, with cold
-- caches and no CUDA graph, and what the slowest of many do.
--
-- Percentiles are of all launches of a run, and medians of them over the runs of the current
-- generation that stand highest, as in view `roofline`. `own` are this project's implementations.
-- These are never compared with times of throughput, which are of other views.
create or replace view latency as
with runs as (
    select
        *,
        status = 'ok' as timed,
        coalesce(
            standing(status, counts)
            = max(standing(status, counts)) over (partition by device, question),
            false
        ) as is_used
    from current_ops
    where timing = 'latency' and not coalesce(twin, false)
)

select
    device,
    question,
    any_value(columns([
        'op', 'pass', 'implementation', 'role', 'shape', 'dtype', 'problem', 'with_forward'
    ])),
    any_value(role) = 'own' as own,
    case when bool_or(timed) then 'ok' else arg_max(status, recorded_at) end as status,
    any_value(counts) filter (where is_used) as counts,
    arg_max(why_not, recorded_at) filter (where is_used or not timed) as why_not,
    count(*) filter (where is_used) as n_runs,
    min(n_samples) filter (where is_used) as n_launches,
    median(time_ms_p50) filter (where is_used) as p50_ms,
    median(time_ms_p95) filter (where is_used) as p95_ms,
    median(time_ms_p99) filter (where is_used) as p99_ms
from runs
group by device, question;
