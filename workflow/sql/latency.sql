-- Grain: device × comparison_key, one pass of an operator: the time of a single launch with cold
-- caches and no CUDA graph.
--
-- Percentiles are over all launches of a run, and medians of these over the runs that view
-- `summaries` uses. `own` marks this project's implementations. No view compares latencies with
-- times of throughput.
create or replace view latency as
select
    columns([
        'device', 'comparison_key', 'op', 'pass', 'implementation', 'role', 'shape', 'dtype',
        'problem', 'with_forward', 'status', 'valid', 'why_not', 'n_runs'
    ]),
    role = 'own' as own,
    n_samples as n_launches,
    time_ms as p50_ms,
    time_ms_p95 as p95_ms,
    time_ms_p99 as p99_ms
from summaries
where timing = 'latency';
