-- Did anything get slower since a date? The query compares earlier and later code, each against a
-- contender that did not change. Write a date in place of the newest row's month. Where `verdict`
-- is empty, no such contender was timed with both.
select comparison_key, previous_started_at::date as earlier, first_started_at::date as later,
    round(previous_time_ms, 4) as earlier_ms, round(time_ms, 4) as later_ms,
    round(ratio, 3) as times_as_fast, round(low, 3) as low, round(high, 3) as high, verdict
from regressions
where first_started_at >= (select max(started_at) - interval 30 days from sessions)
order by
    verdict = 'slower' desc nulls last, verdict is null asc, time_ms / previous_time_ms desc
limit 40;
