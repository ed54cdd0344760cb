-- Grain: device × comparison_key × stage × pass, of whole steps (with optimizer): median device
-- time over the valid runs of the current code version, and its share of all stages' sum.
--
-- `step_ms` is the median time of the same runs' steps: gaps between kernels make up the difference
-- to the sum of all stages. `fastest` marks two steps at these sizes that have no products in 8
-- bits: the shortest of ours and the shortest of PyTorch's. Valid steps come first. Invalid runs
-- are left out; `valid` is null without evidence.
create or replace view stage_share as
with measured as (
    select
        stages.*,
        steps.comparison_key,
        steps.valid,
        steps.role,
        coalesce(steps.precision, '') as precision,
        steps.median_ms
    from stg_stages as stages
    inner join measurements as steps using (device, run, config_id)
    where
        steps.kind = 'step'
        and steps.is_current
        and steps.valid is distinct from false
        and stages.optimizer
        and stages.study != 'ablation'
),

medians as (
    select
        device,
        comparison_key,
        stage,
        pass,
        min(config_id) as config_id,
        any_value(columns([
            'study', 'shape', 'variant', 'role', 'batch', 'n_context', 'n_target', 'dtype',
            'checkpoint', 'cuda_graph', 'precision'
        ])),
        bool_and(valid) as valid,
        median(time_ms_p50) as time_ms,
        max(n_kernels) as n_kernels,
        median(median_ms) as step_ms
    from measured
    group by device, comparison_key, stage, pass
)

select
    *,
    time_ms / sum(time_ms) over (partition by device, comparison_key) as share,
    precision = ''
    and rank()
        over (
            partition by
                device, shape, batch, n_context, n_target, dtype, precision, role = 'own'
            order by valid is not true, step_ms, comparison_key
        )
    = 1 as fastest
from medians;
