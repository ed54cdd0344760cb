-- Grain: device × code_version, of all that was timed: its median over the runs, and the earlier
-- code version of the same comparison key.
--
-- Invalid runs are left out where there are valid runs. Without these `is_comparable` is false: no
-- view compares such a version, and it is nobody's predecessor. A step's model is known by its
-- operations (`flops`). `in_speed_figures` is true where the figures of speed show the contender.
-- It is false for the ablation's steps, forward and backward alone, `auto`, the ceilings,
-- latencies and language models.
create or replace view contenders as
with used as (
    select
        *,
        case
            when kind != 'step' then null
            when starts_with(variant, 'only_') then 'only'
            when starts_with(variant, 'without_') then 'without'
            when study = 'ablation' then 'whole'
        end as ablation_part,
        -- DuckDB's command line 1.5 does not know `if` in a view that DuckDB 2.0 stored.
        case
            when kind = 'step' then optimizer and study != 'ablation'
            when kind = 'generation' then false
            else
                implementation != 'auto'
                and not is_ceiling(op)
                and coalesce(timing, '') != 'latency'
        end as in_speed_figures
    from measurements
    where is_timed and not coalesce(twin, false)
    qualify is_comparable = bool_or(is_comparable) over (partition by device, code_version)
),

of_runs as (
    select
        device,
        code_version,
        is_comparable,
        any_value(columns([
            'kind', 'work_key', 'comparison_key', 'name', 'switches', 'role', 'versions',
            'ablation_part', 'is_current'
        ])),
        coalesce(any_value(precision), '') as precision,
        -- Rows of one commit leave out the work that `skip_unread` does.
        max(flops) filter (where kind = 'step') as flops,
        bool_or(in_speed_figures) as in_speed_figures,
        bool_or(coalesce(valid, false)) as has_evidence,
        count(distinct run) as n_runs,
        median(log_ms) as log_ms,
        min(started_at) as first_started_at,
        max(started_at) as last_started_at
    from used
    group by device, code_version, is_comparable
)

select
    *,
    lag(code_version) over of_key as previous_code_version,
    lag(log_ms) over of_key as previous_log_ms,
    lag(last_started_at) over of_key as previous_started_at
from of_runs
window
    of_key as (
        partition by device, comparison_key, is_comparable
        order by first_started_at, code_version
    );
