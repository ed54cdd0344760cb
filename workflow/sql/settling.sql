-- Grain: run × pass: whether the device had settled while the run was sampled.
--
-- Contenders of a run take turns, so what has not settled is the device, for all of them alike: it
-- has where the medians of the first and the last third of whole rounds are less than 1 % apart.
-- A round is all that its calls took; a sample is the mean of the launches of one.
-- One contender's own samples say little of it: at the power limit they vary by 4 %. Rows of the
-- first sitting have in column `settled` what each contender's samples said, so the raw samples
-- decide. Samples from before they carried their time are not in it.
create or replace table settling as
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

counted as (
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
    )) < 0.01 as settled
from counted
group by run_id, pass;
