-- Grain: device × comparison_key, one pass of an operator: the time of a single launch with cold
-- caches and no CUDA graph.
--
-- Percentiles are over all launches of a run, and medians of these over the runs that view
-- `summaries` uses. `own` marks this project's implementations. No view compares latencies with
-- times of throughput, or with latencies of another timing policy (`timing_hash`): each problem has
-- the rows of its newest policy.
create or replace view latency as
with policies as (
    select
        device,
        op,
        pass,
        problem,
        arg_max(timing_hash, recorded_at) as timing_hash
    from measurements
    where timing = 'latency' and status = 'ok'
    group by all
)

select
    columns([
        'device', 'comparison_key', 'op', 'pass', 'implementation', 'role', 'shape', 'dtype',
        'problem', 'timing_hash', 'with_forward', 'status', 'valid', 'why_not', 'n_runs'
    ]),
    role = 'own' as own,
    n_samples as n_launches,
    time_ms as p50_ms,
    time_ms_p95 as p95_ms,
    time_ms_p99 as p99_ms
from summaries
inner join policies using (device, op, pass, problem, timing_hash)
where timing = 'latency';
