-- topic: operators
-- # How long a single launch takes
-- The table has microseconds of one launch among many single ones. Each launch stands between two
-- events of its own, without a CUDA graph. The L2 cache is overwritten before each, and
-- implementations take turns. 95 and 99 of 100 launches stay below p95 and p99. These rows are not
-- compared with means of many launches, and have no verdict.
select
    device,
    op as operator,
    pass,
    shape,
    implementation,
    case when own then 'ours' else 'others' end as whose,
    format('{:.2f}', 1000 * p50_ms) as p50_in_µs,
    format('{:.2f}', 1000 * p95_ms) as p95_in_µs,
    format('{:.2f}', 1000 * p99_ms) as p99_in_µs,
    n_launches as launches,
    evidence_cell(valid, why_not) as evidence
from latency
where status = 'ok'
order by
    device asc, op asc, pass desc, shape asc, p50_ms asc, implementation asc, comparison_key asc;
