-- Grain: device × run × config_id: a recorded form of a language model that wrote new tokens, with
-- its comparison key. Its time is that of one token of all sequences.
--
-- Each form has a `pass` of its own: the host limits some forms, and its noise must not make the
-- others' samples too imprecise.
create or replace view stg_generations as
select
    *,
    run_of(run_id, device, recorded_at) as run,
    'generation' as kind,
    'generation ' || form as pass,
    form as code_of,
    concat_ws(' ', model, weights) as part,
    form as name,
    '' as switches,
    concat_ws(
        ' ', dtype, 'batch=' || batch, 'n_prompt=' || n_prompt, 'n_new=' || n_new
    ) as sizes,
    concat_ws(' ', model, weights, sizes) as work_key,
    concat_ws(' ', device, 'language model', form, work_key) as comparison_key,
    token_ms_p50 as median_ms,
    token_ms_mean as mean_ms,
    token_ms_std as std_ms,
    coalesce(source_hash, '-') as host_hash,
    list_transform(json_keys(operators), lambda name: name || '/' || (operators ->> name)) as uses,
    true as checked
from generations
qualify
    row_number() over (partition by device, run, config_id order by recorded_at, origin) = 1;
