-- Did anything get slower since a date? Earlier and later code, each against what did not change.
select device, question, previous_started_at, first_started_at,
    previous_time_ms, time_ms, ratio, low, high, verdict
from regressions
where first_started_at >= timestamptz '2026-01-01'
order by verdict = 'slower' desc nulls last, time_ms / previous_time_ms desc;
