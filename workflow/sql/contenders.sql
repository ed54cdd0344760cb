-- Grain: device × generation, of those that were timed: what it is, its median over the runs, and
-- the generation of the same question before it.
create or replace view contenders as
with timed as (
    select
        device,
        generation,
        any_value(kind) as kind,
        any_value(family) as family,
        max(flops) as flops, -- rows of one commit left out what `skip_unread` does
        any_value(question) as question,
        any_value(name) as name,
        any_value(switches) as switches,
        any_value(role) as role,
        any_value(versions) as versions,
        any_value(ablation_part) as ablation_part,
        bool_or(shown) as shown,
        any_value(is_current) as is_current,
        bool_or(coalesce(counts, false)) as has_evidence,
        count(distinct run) as n_runs,
        median(log_ms) as log_ms,
        min(started_at) as first_started_at,
        max(started_at) as last_started_at
    from timings
    where not twin
    group by device, generation
)

select
    *,
    lag(generation) over of_question as previous_generation,
    lag(log_ms) over of_question as previous_log_ms,
    lag(last_started_at) over of_question as previous_started_at
from timed
window of_question as (partition by device, question order by first_started_at, generation);
