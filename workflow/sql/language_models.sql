-- Macro: GB/s that a GPU copies at, where the store has none of its own ceilings: an H100 (80 GB,
-- HBM3) copied at 3.0 TB/s here.
create or replace macro copies_at(device) as
case when starts_with(device, 'nvidia-h100') then 3000 end;

-- Grain: device × model × weights × batch × n_prompt × n_new × form: how fast a form of a language
-- model writes tokens, as medians over the runs that view `measurements` uses.
--
-- `limit_tokens_per_s` is the rate at which the device could read the weights and the cache of each
-- step, at its own ceiling for reading, or else for copying. `own_speedup` is how many times as
-- fast this project's form is. It has an interval and a verdict where the two took turns in one
-- process; elsewhere it divides two medians.
create or replace view language_models as
with used as (
    select
        *,
        status = 'ok' as was_timed
    from measurements
    where kind = 'generation' and is_current
),

forms as (
    select
        device,
        comparison_key,
        any_value(columns([
            'model', 'weights', 'batch', 'n_prompt', 'n_new', 'form', 'role', 'work_key',
            'code_version'
        ])),
        min(shape) as shape,
        case when bool_or(was_timed) then 'ok' else arg_max(status, recorded_at) end as status,
        arg_max(reason, recorded_at) filter (where reason != '') as reason,
        any_value(valid) filter (where is_used) as valid,
        arg_max(why_not, recorded_at) filter (where is_used or not was_timed) as why_not,
        count(*) filter (where is_used) as n_runs,
        median(median_ms) filter (where is_used) as token_ms,
        median(columns(['token_ms_p95', 'prompt_ms_p50', 'tokens_per_s', 'bare_ms']))
        filter (where is_used),
        max(n_kernels) filter (where is_used) as n_kernels,
        max(bytes) as bytes,
        max(peak_memory_bytes) filter (where is_used) as peak_memory_bytes,
        max(recorded_at) as recorded_at
    from used
    group by device, comparison_key
),

limited as (
    select
        forms.* replace (max(bytes) over (partition by device, work_key) as bytes),
        1e9
        * batch
        * coalesce(ceiling_read_gb_per_s, ceiling_gb_per_s, copies_at(device))
        / max(bytes) over (partition by device, work_key)
            as limit_tokens_per_s
    from forms
    left join ceilings using (device)
),

own_forms as (
    select
        device,
        work_key,
        code_version as own_version,
        token_ms as own_token_ms
    from limited
    where role = 'own' and token_ms is not null and valid is distinct from false
)

select
    limited.* exclude (work_key, code_version),
    tokens_per_s / limit_tokens_per_s as share_of_limit,
    coalesce(
        contrasts.ratio, case when valid is distinct from false then token_ms / own_token_ms end
    ) as own_speedup,
    contrasts.low as own_speedup_low,
    contrasts.high as own_speedup_high,
    contrasts.verdict as own_verdict,
    contrasts.n_pairs
from limited
left join own_forms
    on
        limited.device = own_forms.device
        and limited.work_key = own_forms.work_key
        and limited.role != 'own'
left join contrasts
    on
        contrasts.figure = 'language_models'
        and own_forms.own_version = contrasts.own
        and limited.code_version = contrasts.base;
