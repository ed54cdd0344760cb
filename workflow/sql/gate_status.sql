-- Grain: device × gate: its newest run's checks, counted. `passed` is null where the device could
-- run none of them, and where the gate did not finish and no check is red.
create or replace view gate_status as
with checks as (
    select
        *,
        status in ('killed', 'timeout') as is_unfinished,
        status != 'unsupported' and not is_unfinished and not coalesce(passed, false) as failed,
        -- Larger values are better where a larger one passes: the ratio is turned.
        case
            when bound = 0 and value = 0 then 0
            when metric = 'cosine' then (1 - value) / (1 - bound)
            when (value > bound) = passed then bound / value
            else value / bound
        end as value_over_bound
    from current_gates
),

blocked as (
    select distinct
        device,
        comparison_key,
        reason
    from current_steps
    where status = 'gate_failed'
    union all
    select distinct
        device,
        comparison_key,
        reason
    from current_ops
    where status = 'gate_failed' and pass = 'forward'
)

select
    device,
    gate,
    any_value(phase) as phase,
    count(*) as n_checks,
    count(*) filter (where failed) as n_failed,
    count(*) filter (where status = 'unsupported') as n_skipped,
    case
        when n_failed > 0 then false
        when n_skipped < n_checks and not bool_or(is_unfinished) then true
    end as passed,
    arg_max("check", row(value_over_bound, "check"))
    filter (where value_over_bound is not null)
        as worst_check,
    max(value_over_bound) as worst_value_over_bound,
    (
        select count(*) from blocked
        where
            blocked.device = checks.device
            and starts_with(blocked.reason, concat('gate ', checks.gate, ' '))
    ) as blocked_benchmarks,
    any_value(mode) as mode
from checks
group by device, gate;
