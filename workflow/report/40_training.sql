-- # Whether it trains alike
-- The loss of a run minus that of a run through PyTorch, from the same weights on the same tasks,
-- over the last half of the steps; 90 % intervals. They are called equivalent where the interval
-- lies within the margin: three times what two of PyTorch's own backends differ by, or 0.01 nats
-- where that is more. One run each and one seed.
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
