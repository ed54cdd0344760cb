-- Grain: device × generation, of those that were timed: what it is, its median over the runs, and
-- the generation of the same question before it.
--
-- Runs that are known not to count are left out where there are others. Where there are none,
-- `may_count` is false: nothing is compared with such a generation, nor is it anybody's previous.
create or replace view contenders as
with used as (
    select
        *,
        (counts is distinct from false) as may_count
    from timed
    where not twin
    qualify may_count = bool_or(may_count) over (partition by device, generation)
),

of_runs as (
    select
        device,
        generation,
        may_count,
        any_value(columns([
            'kind', 'family', 'question', 'name', 'switches', 'role', 'versions', 'ablation_part',
            'is_current', 'precision'
        ])),
        max(flops) as flops, -- rows of one commit left out what `skip_unread` does
        bool_or(shown) as shown,
        bool_or(coalesce(counts, false)) as has_evidence,
        count(distinct run) as n_runs,
        median(log_ms) as log_ms,
        min(started_at) as first_started_at,
        max(started_at) as last_started_at
    from used
    group by device, generation, may_count
)

select
    *,
    lag(generation) over of_question as previous_generation,
    lag(log_ms) over of_question as previous_log_ms,
    lag(last_started_at) over of_question as previous_started_at
from of_runs
window
    of_question as (
        partition by device, question, may_count order by first_started_at, generation
    );
