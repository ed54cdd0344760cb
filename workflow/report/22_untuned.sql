-- topic: attention
-- # Attention at sizes that nobody tuned for
-- Study `untuned`: 8 heads of 64, 1 to 64 tasks, 100 to 20,000 queries and 1 to 20,000 keys, none
-- of which has an entry in the table that our kernels are chosen by. At each size the faster of our
-- `separate` and `fused` beside the fastest of the others: PyTorch's flash and cuDNN, and
-- FlashAttention-3 and -4. The ratio is the time of the others' fastest over ours; sizes without
-- evidence for one are left out. "Clearly below 97 percent" are sizes of which the whole interval
-- lies below 0.97. What `auto` loses by its choice of these is in the table "What the automatic
-- choice costs".
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
