-- Grain: device × run: whether a training run's loss is equivalent to the loss of its baseline, by
-- the curves of one seed. View `training_seeds` judges by several seeds.
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

half_widths as (
    select
        *,
        student_quantile_95(n_rows - 1) * standard_error as half_width
    from means
)

select
    * exclude (half_width, spread, allowed),
    mean_difference - half_width as difference_low,
    mean_difference + half_width as difference_high,
    run = 'gp_small_flash' as is_null_pair,
    case when not is_null_pair then allowed end as margin,
    difference_low > -margin and difference_high < margin as equivalent
from half_widths
inner join margins using (device);
