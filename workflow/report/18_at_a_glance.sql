-- # Operators at a glance
-- The table counts problem sizes. At each size it takes the best of our implementations that has a
-- verdict, and compares it with the fastest of PyTorch and the other packages that ran there. A
-- ratio above 1 means that ours is faster. The pages of [results/](results) have every size.
with
best as (
    select
        device,
        op,
        pass,
        coalesce(problem, shape) as problem, -- early rows lack it
        dtype,
        max_by(verdict_best, speedup_best) as verdict,
        max(speedup_best) as ratio
    from own_operators
    where verdict_best is not null
    group by all
)

select
    device,
    op as operator,
    pass,
    count(*) as sizes,
    count(*) filter (verdict = 'faster') as faster,
    count(*) filter (verdict = 'same') as same,
    count(*) filter (verdict = 'ambiguous') as ambiguous,
    count(*) filter (verdict = 'slower') as slower,
    round(min(ratio), 2) as lowest_ratio,
    round(median(ratio), 2) as median_ratio,
    round(max(ratio), 2) as highest_ratio
from best
group by all
order by device asc, op asc, pass desc;
