-- Grain: device × op × shape × dtype: the fastest of what `auto` chooses from, forward and backward
-- together.
--
-- An implementation of lower rank, PyTorch first, stays where the fastest is less than 1 % faster:
-- two runs differ by as much (`fastest` in tnp/tuning.py).
create or replace view operator_choice as
with candidates as (
    select
        *,
        min(time_ms) over of_shape as best_time_ms,
        first_value(implementation) over (of_shape order by time_ms, rank) as best_implementation,
        count(*) over of_shape as n_candidates
    from operator_training
    inner join auto_candidates using (op, implementation)
    where time_ms is not null
    window of_shape as (partition by device, op, shape, dtype)
),

capabilities as (
    select
        environment_id,
        any_value(try_cast(replace(compute_capability, '.', '') as integer)) as capability
    from environments
    group by environment_id
)

select
    device,
    capability,
    op,
    shape,
    dtype,
    batch,
    n_q,
    n_k,
    n_heads,
    head_dim,
    d_model,
    d_ff_storage,
    n_components,
    n_candidates,
    implementation,
    time_ms,
    best_implementation,
    best_time_ms
from candidates
left join capabilities using (environment_id)
where time_ms <= 1.01 * best_time_ms
qualify row_number() over (partition by device, op, shape, dtype order by rank) = 1;
