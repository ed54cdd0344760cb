-- Grain: device × comparison_key of an operator of ours that was timed, beside all others of its
-- sizes.
--
-- `others` lists implementations that are not ours with their times in ms, fastest first. After
-- them it lists implementations without a time, with their status. Planning time is not part of a
-- time; it stands in brackets after it. `auto` is left out: it is one of the rest, and view
-- `auto_regret` says which.
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
        problem ->> '$.options.bits' as bits,
        string_agg(
            implementation || ' ' || coalesce(format('{:.4g}', time_ms), status)
            || coalesce(format(' (plan {:.2g})', plan_ms), ''),
            ', ' order by time_ms nulls last, implementation
        ) as others
    from operator_speedup
    where role != 'own'
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
        -- Only operators of a step have these sizes, and only attention has keys.
        and own.batch is not distinct from others.batch
        and own.n_q is not distinct from others.n_q
        and own.n_k is not distinct from others.n_k
        and own.dtype = others.dtype
        -- Codes of 4 and 8 bits have equal sizes.
        and own.problem ->> '$.options.bits' is not distinct from others.bits
where own.role = 'own' and own.status = 'ok' and own.implementation != 'auto';
