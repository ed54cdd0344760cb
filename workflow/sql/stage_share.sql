-- Grain: device × config_id × stage, of whole steps (with optimizer): median over the replicates,
-- and its share of all stages' sum.
create or replace view stage_share as
with current_stages as (
    select stages.* from stages
    semi join current_steps using (device, config_id, replicate, recorded_at, origin)
    where stages.optimizer and stages.study != 'ablation'
),

medians as (
    select
        device,
        config_id,
        stage,
        any_value(study) as study,
        any_value(shape) as shape,
        any_value(variant) as variant,
        any_value(batch) as batch,
        any_value(n_context) as n_context,
        any_value(n_target) as n_target,
        any_value(dtype) as dtype,
        any_value(checkpoint) as checkpoint,
        any_value(cuda_graph) as cuda_graph,
        median(time_ms_p50) as time_ms
    from current_stages
    group by device, config_id, stage
)

select
    *,
    time_ms / sum(time_ms) over (partition by device, config_id) as share
from medians;
