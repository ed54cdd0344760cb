-- Grain: figure × device × own × base: how many times as fast `own` is (`ratio`), in which 95 %
-- interval, and the verdict.
--
-- `p` is how probable so large a ratio would be, up or down, if the true one were 1 % from 1. `q`
-- is p corrected for all that the figure shows on the device (Benjamini and Hochberg). `faster` and
-- `slower`: q < 0.05, and the interval lies beyond 1 by more than 1 %; `same`: the interval lies
-- within 1 % of 1; otherwise `ambiguous`. Null where a row has no evidence.
create or replace table contrasts as
with tested as (
    select
        *,
        log_ratio - student_quantile(degrees) * log_error as log_low,
        log_ratio + student_quantile(degrees) * log_error as log_high,
        student_tail((abs(log_ratio) - margin()) / log_error, degrees)
        + student_tail((abs(log_ratio) + margin()) / log_error, degrees) as p
    from comparisons
),

ranked as (
    select
        *,
        p
        * count(p) over (partition by figure, device)
        / row_number() over (partition by figure, device order by p) as p_by_rank
    from tested
),

corrected as (
    select
        *,
        case
            when p is not null
                then
                    least(
                        1, min(p_by_rank) over (partition by figure, device order by p desc)
                    )
        end as q
    from ranked
)

select
    * exclude (p_by_rank, log_low, log_high),
    exp(log_ratio) as ratio,
    exp(log_low) as low,
    exp(log_high) as high,
    case
        when log_error is null then null
        when q < 0.05 and log_low > margin() then 'faster'
        when q < 0.05 and log_high < -margin() then 'slower'
        when log_low > -margin() and log_high < margin() then 'same'
        else 'ambiguous'
    end as verdict
from corrected;
