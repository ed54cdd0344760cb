-- Grain: device × shape × component: what one component of our full variant gains in a step.
--
-- Four steps of study `ablation`: `base`, PyTorch's; `only`, base with the component; `full`, all
-- components; `without`, full but for the component. `alone` is what it gains added to base, `last`
-- what is lost when it is taken from full; intervals are 95 % bootstrap. Null where one of the two
-- steps failed (`status`, `reason`) or was not run.
create or replace view ablation as
with steps as (
    select
        *,
        regexp_extract(variant, '^(only|without)_(.+)$', ['end', 'component']) as parts,
        case
            when parts['end'] != '' then parts['end']
            when starts_with(variant, 'sdpa_') then 'base'
            else 'full'
        end as part,
        nullif(parts['component'], '') as component
    from step_summary
    where study = 'ablation'
),

components as (
    select distinct
        device,
        shape,
        component
    from steps
    where component is not null
),

-- The four steps of each component: those without a component belong to all of their shape.
parts as (
    select
        components.*,
        steps.* exclude (device, shape, component)
    from components
    inner join steps
        on
            components.device = steps.device
            and components.shape = steps.shape
            and (steps.component is null or components.component = steps.component)
),

wide as (
    select
        device,
        shape,
        component,
        any_value(batch) as batch,
        any_value(n_context) as n_context,
        any_value(n_target) as n_target,
        any_value(dtype) as dtype,
        bool_or(cuda_graph) as cuda_graph,
        min(n_replicates) as n_replicates,
        any_value(variant) filter (where part = 'base') as base_variant,
        any_value(variant) filter (where part = 'full') as full_variant,
        coalesce(arg_min(status, config_id) filter (where status != 'ok'), 'ok') as status,
        arg_min(reason, config_id) filter (where status != 'ok') as reason,
        any_value(step_ms) filter (where part = 'base') as base_ms,
        any_value(step_ms) filter (where part = 'only') as only_ms,
        any_value(step_ms) filter (where part = 'full') as full_ms,
        any_value(step_ms) filter (where part = 'without') as without_ms,
        bool_and(gate_passed) as gates_passed,
        bool_or(throttled) as throttled
    from parts
    group by device, shape, component
),

resampled as (
    select
        device,
        shape,
        component,
        resample,
        any_value(time_ms) filter (where part = 'base') as base_ms,
        any_value(time_ms) filter (where part = 'only') as only_ms,
        any_value(time_ms) filter (where part = 'full') as full_ms,
        any_value(time_ms) filter (where part = 'without') as without_ms
    from parts
    inner join resamples using (device, config_id)
    where pass = 'step' and status = 'ok'
    group by device, shape, component, resample
),

intervals as (
    select
        device,
        shape,
        component,
        quantile_cont(base_ms - only_ms, [0.025, 0.975]) as alone,
        quantile_cont(without_ms - full_ms, [0.025, 0.975]) as last
    from resampled
    group by device, shape, component
)

select
    device,
    shape,
    component,
    batch,
    n_context,
    n_target,
    dtype,
    cuda_graph,
    n_replicates,
    base_variant,
    full_variant,
    status,
    reason,
    base_ms,
    only_ms,
    full_ms,
    without_ms,
    base_ms - only_ms as gain_alone_ms,
    alone[1] as gain_alone_low_ms,
    alone[2] as gain_alone_high_ms,
    base_ms / only_ms as speedup_alone,
    without_ms - full_ms as gain_last_ms,
    last[1] as gain_last_low_ms,
    last[2] as gain_last_high_ms,
    without_ms / full_ms as speedup_last,
    gates_passed,
    throttled
from wide
left join intervals using (device, shape, component);
