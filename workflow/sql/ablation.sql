-- Grain: device × shape × component: the gain of one component of our whole variant in a step.
--
-- Four steps of study `ablation` take part: `base`, PyTorch's; `only`, base with the component;
-- `full`, all components; `without`, full but for the component. `alone` is the gain of adding the
-- component to base, `last` the loss of taking it from full. Ratios, 95 % intervals and verdicts
-- come from table `contrasts`; a gain in ms is the ratio's at the median of the faster step. Base
-- and full are the code versions that were timed beside the component's step. Gains are null where
-- one of the two steps failed (`status`, `reason`) or was not run.
create or replace view ablation as
with ablated as (
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
    from ablated
    where component is not null
),

-- The four steps of each component; a step without a component belongs to all of its shape.
parts as (
    select
        components.*,
        ablated.* exclude (device, shape, checkpoint, cuda_graph, component)
    from components
    inner join ablated
        on
            components.device = ablated.device
            and components.shape = ablated.shape
            and components.checkpoint = ablated.checkpoint
            and components.cuda_graph = ablated.cuda_graph
            and (ablated.component is null or components.component = ablated.component)
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
        any_value(code_version) filter (where part = 'only') as only_code_version,
        any_value(code_version) filter (where part = 'without') as without_code_version,
        case when not bool_and(valid) then false when count(valid) = count(*) then true end
            as valid,
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
    wide.* exclude (only_code_version, without_code_version) replace (
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
left join compared as alone on wide.only_code_version = alone.own
left join contenders as base on alone.base = base.code_version
left join compared as last on wide.without_code_version = last.base
left join contenders as whole on last.own = whole.code_version;
