-- Grain: run_id × pass: whether a run's raw samples are precise enough (`precise_enough`).
--
-- They are where the medians of the first and the last third of whole rounds differ by less than 1
-- %. A round is all the time that its calls took; a sample is the mean of one call's launches. The
-- contenders of a run take turns, so a drift is the device's and one answer serves them all. One
-- contender's own samples say little: at the power limit they vary by 4 %. The first rows recorded
-- such an answer for each contender in `settled`; this view replaces it. Early samples carry no
-- time of their own and are left out.
create or replace table stg_samples as
with rounds as (
    select
        run_id,
        pass,
        sample,
        sum(time_ms * coalesce(n_launches, 1)) as round_ms
    from samples
    where run_id is not null and t_s is not null
    group by all
),

placed as (
    select
        *,
        greatest(1, count(*) over (partition by run_id, pass) // 3) as third,
        row_number() over (partition by run_id, pass order by sample) as place,
        count(*) over (partition by run_id, pass) as n_rounds
    from rounds
)

select
    run_id,
    pass,
    abs(ln(
        median(round_ms) filter (where place > n_rounds - third)
        / median(round_ms) filter (where place <= third)
    )) < 0.01 as precise_enough
from placed
group by run_id, pass;
