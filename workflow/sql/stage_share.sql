-- Grain: device × question × stage, of whole steps (with optimizer): median over the runs of the
-- current generation, and its share of all stages' sum. What does not count is left out; `counts`
-- is null where that is not known.
create or replace view stage_share as
with current_stages as (
    select
        stages.*,
        question,
        counts,
        role
    from stages
    inner join current_steps
        on
            stages.device = current_steps.device
            and run_of(stages.run_id, stages.device, stages.recorded_at) = current_steps.run
            and stages.config_id = current_steps.config_id
    where
        stages.optimizer
        and stages.study != 'ablation'
        and current_steps.counts is distinct from false
),

medians as (
    select
        device,
        question,
        stage,
        min(config_id) as config_id,
        any_value(columns([
            'study', 'shape', 'variant', 'role', 'batch', 'n_context', 'n_target', 'dtype',
            'checkpoint', 'cuda_graph'
        ])),
        bool_and(counts) as counts,
        median(time_ms_p50) as time_ms
    from current_stages
    group by device, question, stage
)

select
    *,
    time_ms / sum(time_ms) over (partition by device, question) as share
from medians;
