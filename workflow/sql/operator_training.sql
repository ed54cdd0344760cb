-- Grain: device × op × shape × dtype × implementation: forward and backward together, of medians
-- over the replicates; null where one of them failed.
--
-- The backward pass of mixture_nll is timed with its forward, so it is all of it.
create or replace view operator_training as
with runs as (
    select
        *,
        bool_or(implementation = 'auto') over (partition by device, op, shape, dtype, run)
            as has_auto
    from current_ops
    where not coalesce(twin, false)
),

-- The runs with `auto` in them, or all where none has it; of each replicate the newest.
latest as (
    select * from runs
    qualify
        rank()
            over (
                partition by device, op, shape, dtype, replicate
                order by has_auto desc, recorded_at desc
            )
        = 1
),

passes as (
    select
        device,
        op,
        shape,
        dtype,
        implementation,
        pass,
        any_value(batch) as batch,
        any_value(n_q) as n_q,
        any_value(n_k) as n_k,
        any_value(n_heads) as n_heads,
        any_value(head_dim) as head_dim,
        any_value(d_model) as d_model,
        any_value(d_ff_storage) as d_ff_storage,
        any_value(n_components) as n_components,
        any_value(environment_id) as environment_id,
        any_value(launch_config) as launch_config,
        max(recorded_at) as recorded_at,
        case when bool_and(status = 'ok') then median(time_ms_p50) end as pass_ms
    from latest
    where op not in ('matmul', 'copy')
    group by device, op, shape, dtype, implementation, pass
),

whole as (
    select
        device,
        op,
        shape,
        dtype,
        implementation,
        any_value(columns([
            'batch',
            'n_q',
            'n_k',
            'n_heads',
            'head_dim',
            'd_model',
            'd_ff_storage',
            'n_components',
            'environment_id'
        ])),
        any_value(launch_config) as launch_config,
        max(recorded_at) as recorded_at,
        any_value(pass_ms) filter (where pass = 'forward') as forward_ms,
        any_value(pass_ms) filter (where pass = 'backward') as backward_ms
    from passes
    group by device, op, shape, dtype, implementation
)

select
    *,
    case when op = 'mixture_nll' then backward_ms else forward_ms + backward_ms end as time_ms
from whole;
