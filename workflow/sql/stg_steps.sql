-- Grain: device × run × config_id: a recorded training step, with its role, its comparison key and
-- the implementations in it. Early rows have no role and no mean time.
create or replace view stg_steps as
select
    * replace (
        coalesce(
            role,
            earlier_role(variant, coalesce(operators ->> '$.*', [split_part(variant, '_', 1)]))
        ) as role
    ),
    run_of(run_id, device, recorded_at) as run,
    'step' as kind,
    'step' as pass,
    '' as code_of,
    shape as part,
    variant as name,
    concat_ws(
        ' ',
        case when checkpoint then 'checkpoint' end,
        case when cuda_graph then 'cuda_graph' end
    ) as switches,
    concat_ws(
        ' ', dtype, 'batch=' || batch, 'n_context=' || n_context, 'n_target=' || n_target
    ) as sizes,
    case when not optimizer then 'without_optimizer' end as without,
    concat_ws(' ', sizes, without) as work_key,
    concat_ws(' ', device, variant, sizes, nullif(switches, ''), without) as comparison_key,
    step_ms_p50 as median_ms,
    coalesce(step_ms_mean, step_ms_p50) as mean_ms,
    step_ms_std as std_ms,
    case when not coalesce(cuda_graph, false) then coalesce(source_hash, '-') end as host_hash,
    list_distinct(
        list_concat(
            list_transform(
                json_keys(operators), lambda name: name || '/' || (operators ->> name)
            ),
            list_transform(
                json_transform(choices, '[{"op": "VARCHAR", "implementation": "VARCHAR"}]'),
                lambda choice: choice['op'] || '/' || choice['implementation']
            )
        )
    ) as uses,
    true as checked
from steps
qualify
    row_number() over (partition by device, run, config_id order by recorded_at, origin) = 1;
