-- Grain: device × run × config_id: a recorded form of predictions or joint samples, with its
-- comparison key and the implementations in it.
create or replace view stg_predictions as
select
    *,
    run_of(run_id, device, recorded_at) as run,
    'prediction' as kind,
    'prediction' as pass,
    '' as code_of,
    concat_ws(
        ' ',
        device,
        'predictions',
        form,
        variant,
        dtype,
        'batch=' || batch,
        'n_context=' || n_context,
        'n_target=' || n_target
    ) as comparison_key,
    time_ms_p50 as median_ms,
    time_ms_mean as mean_ms,
    coalesce(source_hash, '-') as host_hash,
    list_transform(json_keys(operators), lambda name: name || '/' || (operators ->> name)) as uses,
    true as checked
from predictions
qualify
    row_number() over (partition by device, run, config_id order by recorded_at, origin) = 1;
