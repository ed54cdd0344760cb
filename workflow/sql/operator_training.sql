-- Grain: device × op × shape × dtype × implementation: forward and backward together, of medians
-- over the runs of the current generations; null where one of them was not timed.
--
-- Where the operator was timed with `auto`, of the runs of `auto`'s current generation alone: what
-- it chose is compared with what was timed beside it, whatever was timed elsewhere since. A
-- backward pass that was timed with its forward is all of it.
create or replace view operator_training as
with runs as (
    select
        *,
        bool_or(implementation = 'auto' and is_current)
            over (partition by device, op, shape, dtype, run)
            as has_auto
    from judged_ops
    where not is_ceiling(op) and not coalesce(twin, false)
),

used as (
    select * from runs
    qualify
        case
            when bool_or(has_auto) over (partition by device, op, shape, dtype) then has_auto
            else is_current
        end
),

passes as (
    select
        device,
        op,
        shape,
        dtype,
        implementation,
        pass,
        any_value(columns([
            'batch', 'n_q', 'n_k', 'n_heads', 'head_dim', 'd_model', 'd_ff_storage', 'n_components'
        ])),
        bool_or(coalesce(with_forward, op = 'mixture_nll')) as with_forward,
        arg_max(environment_id, recorded_at) as environment_id,
        arg_max(launch_config, recorded_at) as launch_config,
        max(recorded_at) as recorded_at,
        median(time_ms_p50) filter (where status = 'ok' and counts is distinct from false)
            as pass_ms,
        bool_and(coalesce(counts, false))
        filter (where status = 'ok' and counts is distinct from false)
            as has_evidence
    from used
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
            'batch', 'n_q', 'n_k', 'n_heads', 'head_dim', 'd_model', 'd_ff_storage', 'n_components',
            'environment_id'
        ])),
        any_value(launch_config) filter (where pass = 'forward') as launch_config,
        max(recorded_at) as recorded_at,
        bool_and(has_evidence) as has_evidence,
        bool_or(with_forward) filter (where pass = 'backward') as with_forward,
        any_value(pass_ms) filter (where pass = 'forward') as forward_ms,
        any_value(pass_ms) filter (where pass = 'backward') as backward_ms
    from passes
    group by device, op, shape, dtype, implementation
)

select
    * exclude (with_forward),
    case when with_forward then backward_ms else forward_ms + backward_ms end as time_ms
from whole;
