-- Grain: device × question of an operator of ours that was timed, beside all others of its sizes.
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

select
    own.*,
    others.others
from operator_speedup as own
left join others
    on
        own.device = others.device
        and own.op = others.op
        and own.pass = others.pass
        and own.shape = others.shape
        and own.batch = others.batch
        and own.n_q = others.n_q
        and own.n_k is not distinct from others.n_k -- only attention has keys
        and own.dtype = others.dtype
where own.role = 'own' and own.status = 'ok' and own.implementation != 'auto';
