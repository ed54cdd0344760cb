-- # Whether it trains alike
-- The table has the loss of a run minus that of a run through PyTorch, over the last half of the
-- steps. Both start from the same weights and see the same tasks. Intervals are of 90 %. Two runs
-- are called equivalent if the interval lies within the margin. The margin is three times the
-- difference of two of PyTorch's own backends, or 0.01 nats if that is more. Each is one run with
-- one seed.
select
    device,
    run,
    variant,
    baseline_variant as compared_with,
    format('{} to {}', first_step, last_step) as steps,
    format('{:.4f}', mean_difference) as difference,
    format('{:.4f} to {:.4f}', difference_low, difference_high) as between_90_percent,
    format('{:.4f}', margin) as margin,
    case when is_null_pair then 'sets the margin' else equivalent::text end as equivalent
from training_equivalence
order by device, run;
