-- Grain: device × op × shape × dtype × implementation: forward and backward together, from medians
-- over the runs of the current code versions; null where one of them was not timed.
--
-- Where the operator was timed with `auto`, only the runs with `auto`'s current code version are
-- used: its choice is compared with what was timed beside it, whatever was timed elsewhere since. A
-- backward pass that was timed with its forward is the whole.
create or replace view operator_training as
with runs as (
    select
        *,
        bool_or(implementation = 'auto' and is_current)
            over (partition by device, op, shape, dtype, run)
            as has_auto,
        status = 'ok' and coalesce(valid, true) as was_timed
    from measurements
    where
        kind = 'operator'
        and forced is null
        and not is_ceiling(op)
        and not coalesce(twin, false)
        and timing is distinct from 'latency'
),

used as (
    select * from runs
    qualify
        case
            when bool_or(has_auto) over (partition by device, op, shape, dtype) then has_auto
            else is_current
        end
),

whole as (
    select
        device,
        op,
        shape,
        dtype,
        implementation,
        any_value(columns([
            'batch', 'n_q', 'n_k', 'n_heads', 'head_dim', 'd_model', 'd_ff_storage', 'n_components'
        ])),
        arg_max(environment_id, recorded_at) as environment_id,
        arg_max(launch_config, recorded_at) filter (where pass = 'forward') as launch_config,
        max(recorded_at) as recorded_at,
        bool_and(coalesce(valid, false)) filter (where was_timed) as has_evidence,
        median(median_ms) filter (where pass = 'forward' and was_timed) as forward_ms,
        median(median_ms) filter (where pass = 'backward' and was_timed) as backward_ms,
        bool_or(coalesce(with_forward, op = 'mixture_nll')) filter (where pass = 'backward')
            as is_whole
    from used
    group by device, op, shape, dtype, implementation
)

select
    * exclude (is_whole),
    case when is_whole then backward_ms else forward_ms + backward_ms end as time_ms
from whole;
