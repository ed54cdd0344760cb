-- Grain: device × operation × shape × dtype: what won when it was last tuned, and by how much.
create or replace view tuning as
with latest as (
    select * from trials
    qualify
        rank()
            over (
                partition by device, operation, shape, dtype order by recorded_at desc, origin asc
            )
        = 1
),

problems as (
    select
        device,
        operation,
        shape,
        dtype,
        any_value(batch) as batch,
        any_value(n_q) as n_q,
        any_value(n_k) as n_k,
        any_value(n_heads) as n_heads,
        any_value(head_dim) as head_dim,
        any_value(capability) as capability,
        count(kernel) as n_trials,
        count(*) filter (where status = 'ok') as n_ok,
        any_value(kernel) filter (where is_default) as default_kernel,
        any_value(launch_config) filter (where is_default) as default_launch_config,
        any_value(time_ms_p50) filter (where is_default and status = 'ok') as default_time_ms,
        arg_min(kernel, time_ms_p50) filter (where status = 'ok') as best_kernel,
        arg_min(launch_config, time_ms_p50) filter (where status = 'ok') as best_launch_config,
        min(time_ms_p50) filter (where status = 'ok') as best_time_ms,
        sum(compile_s) as compile_s,
        max(measure_s) as measure_s,
        any_value(reason) filter (where status != 'ok') as first_failure,
        any_value(throttled) as throttled
    from latest
    group by all
),

-- The default stays where the best is less than 1 % faster: two runs differ by as much.
decided as (
    select
        *,
        default_time_ms / best_time_ms - 1 as margin,
        coalesce(default_time_ms / best_time_ms <= 1.01, false) as default_stays
    from problems
)

select
    device,
    operation,
    shape,
    dtype,
    batch,
    n_q,
    n_k,
    n_heads,
    head_dim,
    capability,
    n_trials,
    n_ok,
    case when default_stays then default_kernel else best_kernel end as kernel,
    case when default_stays then default_launch_config else best_launch_config end as launch_config,
    default_stays,
    default_kernel,
    default_launch_config,
    default_time_ms,
    best_kernel,
    best_launch_config,
    best_time_ms,
    margin,
    compile_s,
    measure_s,
    first_failure,
    throttled
from decided;
