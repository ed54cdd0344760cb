-- Grain: device × question of an operator of ours that was timed, beside all others of its job.
--
-- `others` lists what is not ours with its time in ms, fastest first. `auto` is left out: it is one
-- of the rest, and view `auto_regret` says which.
create or replace view own_operators as
with others as (
    select
        device,
        op,
        pass,
        shape,
        batch,
        n_q,
        n_k,
        dtype,
        string_agg(
            implementation || ' ' || format('{:.4g}', time_ms), ', ' order by time_ms
        ) as others
    from operator_speedup
    where role != 'own' and status = 'ok'
    group by all
)

select *
from operator_speedup
left join others using (device, op, pass, shape, batch, n_q, n_k, dtype)
where role = 'own' and status = 'ok' and implementation != 'auto';
