-- Grain: device × question × stage × pass, of whole steps (with optimizer): median device time over
-- the runs of the current generation, and its share of all stages' sum.
--
-- `step_ms` is the median time of the same runs' steps: what the sum of all stages lacks of it are
-- gaps between kernels. `fastest`: of ours, or of the others, the shortest step at these sizes,
-- those that count first. What does not count is left out; `counts` is null where that is not
-- known. Rows without a source hold the host's time too, and are left out likewise.
create or replace view stage_share as
with current_stages as (
    select
        stages.*,
        question,
        counts,
        role,
        step_ms_p50
    from stages
    inner join current_steps
        on
            stages.device = current_steps.device
            and run_of(stages.run_id, stages.device, stages.recorded_at) = current_steps.run
            and stages.config_id = current_steps.config_id
    where
        stages.source = 'profiler'
        and stages.optimizer
        and stages.study != 'ablation'
        and current_steps.counts is distinct from false
),

medians as (
    select
        device,
        question,
        stage,
        pass,
        min(config_id) as config_id,
        any_value(columns([
            'study', 'shape', 'variant', 'role', 'batch', 'n_context', 'n_target', 'dtype',
            'checkpoint', 'cuda_graph'
        ])),
        bool_and(counts) as counts,
        median(time_ms_p50) as time_ms,
        max(n_kernels) as n_kernels,
        median(step_ms_p50) as step_ms
    from current_stages
    group by device, question, stage, pass
)

select
    *,
    time_ms / sum(time_ms) over (partition by device, question) as share,
    rank()
        over (
            partition by device, shape, batch, n_context, n_target, dtype, role = 'own'
            order by counts is not true, step_ms, question
        )
    = 1 as fastest
from medians;
