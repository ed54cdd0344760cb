-- Grain: device × shape × component: what one component of our whole variant gains in a step.
--
-- Four steps of study `ablation`: `base`, PyTorch's; `only`, base with the component; `full`, all
-- components; `without`, full but for the component. `alone` is what it gains added to base, `last`
-- what is lost when it is taken from full. Ratios, 95 % intervals and verdicts are of view
-- `contrasts`; the gain in ms is the ratio's at the median of the faster step. Of base and full
-- that generation is used which was timed beside the component's step. Null where one of
-- the two steps failed (`status`, `reason`) or was not run.
create or replace view ablation as
with steps as (
    select
        *,
        regexp_extract(variant, '^(only|without)_(.+)$', ['end', 'component']) as parts,
        case
            when parts['end'] != '' then parts['end']
            when role = 'own' then 'full'
            else 'base'
        end as part,
        nullif(parts['component'], '') as component
    from step_summary
    where list_contains(studies, 'ablation')
),

components as (
    select distinct
        device,
        shape,
        checkpoint,
        cuda_graph,
        component
    from steps
    where component is not null
),

-- The four steps of each component: those without a component belong to all of their shape.
parts as (
    select
        components.*,
        steps.* exclude (device, shape, checkpoint, cuda_graph, component)
    from components
    inner join steps
        on
            components.device = steps.device
            and components.shape = steps.shape
            and components.checkpoint = steps.checkpoint
            and components.cuda_graph = steps.cuda_graph
            and (steps.component is null or components.component = steps.component)
),

wide as (
    select
        device,
        shape,
        cuda_graph,
        component,
        any_value(columns(['batch', 'n_context', 'n_target', 'dtype'])),
        min(n_runs) as n_runs,
        any_value(variant) filter (where part = 'base') as base_variant,
        any_value(variant) filter (where part = 'full') as full_variant,
        coalesce(arg_min(status, config_id) filter (where status != 'ok'), 'ok') as status,
        arg_min(reason, config_id) filter (where status != 'ok') as reason,
        any_value(step_ms) filter (where part = 'base') as base_ms,
        any_value(step_ms) filter (where part = 'only') as only_ms,
        any_value(step_ms) filter (where part = 'full') as full_ms,
        any_value(step_ms) filter (where part = 'without') as without_ms,
        any_value(generation) filter (where part = 'only') as only_generation,
        any_value(generation) filter (where part = 'without') as without_generation,
        case when not bool_and(counts) then false when count(counts) = count(*) then true end
            as counts,
        arg_min(why_not, config_id) filter (where why_not is not null) as why_not,
        bool_or(throttled) as throttled
    from parts
    group by device, shape, checkpoint, cuda_graph, component
),

compared as (
    select * from contrasts
    where figure = 'ablation'
)

select
    wide.* exclude (only_generation, without_generation) replace (
        coalesce(base.name, base_variant) as base_variant,
        coalesce(whole.name, full_variant) as full_variant,
        coalesce(exp(base.log_ms), base_ms) as base_ms,
        coalesce(exp(whole.log_ms), full_ms) as full_ms
    ),
    alone.ratio as speedup_alone,
    alone.low as speedup_alone_low,
    alone.high as speedup_alone_high,
    alone.q as q_alone,
    alone.verdict as verdict_alone,
    only_ms * (alone.ratio - 1) as gain_alone_ms,
    only_ms * (alone.low - 1) as gain_alone_low_ms,
    only_ms * (alone.high - 1) as gain_alone_high_ms,
    last.ratio as speedup_last,
    last.low as speedup_last_low,
    last.high as speedup_last_high,
    last.q as q_last,
    last.verdict as verdict_last,
    exp(whole.log_ms) * (last.ratio - 1) as gain_last_ms,
    exp(whole.log_ms) * (last.low - 1) as gain_last_low_ms,
    exp(whole.log_ms) * (last.high - 1) as gain_last_high_ms
from wide
left join compared as alone on wide.only_generation = alone.own
left join contenders as base on alone.base = base.generation
left join compared as last on wide.without_generation = last.base
left join contenders as whole on last.own = whole.generation;
