-- Grain: device × run: whether a training run's loss is equivalent to the loss of `gp_small_sdpa`.
--
-- The sample are the differences of view `training_differences`, taken as independent.
-- `equivalent`: both one-sided t-tests at 5 % reject a difference of `margin` or more, so the 90 %
-- interval of the mean lies within ± margin. The margin is 0.01 nats or, where larger, three times
-- the absolute mean difference of the null pair. That is run `gp_small_flash`, which differs from
-- `gp_small_sdpa` in PyTorch's attention backend and in the padding of d_ff. Above 0.02, PyTorch's
-- own runs differ too much to compare with: margin and `equivalent` are null. They are null for the
-- null pair itself, too.
create or replace view training_equivalence as
with means as (
    select
        device,
        run,
        any_value(variant) as variant,
        any_value(baseline_run) as baseline_run,
        any_value(baseline_variant) as baseline_variant,
        min(step) as first_step,
        max(step) as last_step,
        count(*) as n_rows,
        avg(difference) as mean_difference,
        stddev_samp(difference) / sqrt(n_rows) as standard_error
    from training_differences
    group by device, run
    having count(*) > 1
),

margins as (
    select
        device,
        3 * abs(any_value(mean_difference) filter (where run = 'gp_small_flash')) as spread,
        case when spread is null or spread <= 0.02 then greatest(0.01, spread) end as allowed
    from means
    group by device
),

-- Student's t at 95 %, n − 1 degrees of freedom, from the normal quantile 1.645: the first terms of
-- Cornish and Fisher's expansion, right to 0.02 from four degrees on.
quantiles as (
    select
        *,
        n_rows - 1 as degrees,
        1.6449 + 1.5238 / degrees + 1.4202 / pow(degrees, 2) as t_quantile
    from means
)

select
    * exclude (degrees, t_quantile, spread, allowed),
    mean_difference - t_quantile * standard_error as difference_low,
    mean_difference + t_quantile * standard_error as difference_high,
    run = 'gp_small_flash' as is_null_pair,
    case when not is_null_pair then allowed end as margin,
    difference_low > -margin and difference_high < margin as equivalent
from quantiles
inner join margins using (device);
