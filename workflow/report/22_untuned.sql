-- topic: attention
-- # Attention at sizes that nobody tuned for
-- Study `untuned` has 8 heads of 64, 1 to 64 tasks, 100 to 20,000 queries and 1 to 20,000 keys. The
-- table that our kernels are chosen by has no entry for these sizes. At each size the table
-- compares the faster of `separate` and `fused` with the fastest of PyTorch's flash and cuDNN,
-- FlashAttention-3 and FlashAttention-4.
--
-- The ratio is the time of the fastest other over ours. Sizes without evidence are left out.
-- "Clearly below 97 percent" counts sizes whose whole interval lies below 0.97.
with fastest as (
    select * from own_operators
    where op = 'attention' and config_id like 'untuned--%' and time_ms is not null
    qualify
        row_number() over (partition by device, shape, pass order by time_ms, implementation) = 1
)

select
    device,
    pass,
    count(*) as sizes,
    min(speedup_best) as least_ratio,
    arg_min(shape, speedup_best) as where_least,
    median(speedup_best) as median_ratio,
    count(*) filter (where speedup_best_high < 0.97) as clearly_below_97_percent
from fastest
where speedup_best is not null
group by device, pass
order by device asc, pass desc;
