-- Grain: own × base: the mean difference of their pairs (`log_ratio`), its standard error and
-- degrees of freedom. Pairs without evidence are left out where there are pairs with evidence.
-- Alone they have no error.
--
-- `equal_variance` is the mean square of the differences between equal things of the same sizes.
-- With fewer than 8 such pairs, pairs of the same `part` count (an operator's pass, or a step's
-- shape). With fewer than 8 of these, all operators or all steps of the device count. Both values
-- are at least as large as the few pairs of these sizes show, because long calls meet the power
-- limit and short ones do not. With fewer than 8 pairs on the device it is an assumed value.
create or replace table estimates as
with equal_sizes as (
    select
        device,
        kind,
        work_key,
        avg(difference ** 2) as size_variance,
        count(*) as n_size
    from pairs
    where successive and valid
    group by device, kind, work_key
),

equal_parts as (
    select
        device,
        kind,
        part,
        avg(difference ** 2) as part_variance,
        count(*) as n_part
    from pairs
    where successive and valid
    group by device, kind, part
),

equal_kinds as (
    select
        device,
        kind,
        sum(part_variance * n_part) / sum(n_part) as kind_variance,
        sum(n_part) as n_kind
    from equal_parts
    group by device, kind
),

best_evidence as (
    select
        *,
        coalesce(bool_or(valid) over (partition by device, own, base), false) as has_evidence
    from pairs
),

differences as (
    select
        device,
        kind,
        part,
        work_key,
        equal,
        own,
        base,
        has_evidence,
        count(*) as n_pairs,
        count(distinct session) as n_sessions,
        avg(difference) as log_ratio,
        coalesce(var_samp(difference), 0) as variance
    from best_evidence
    where coalesce(valid, false) = has_evidence
    group by device, kind, part, work_key, equal, own, base, has_evidence
)

select
    differences.*,
    case
        when n_size >= 8 then size_variance
        when n_part >= 8 then greatest(part_variance, size_variance)
        when n_kind >= 8 then greatest(kind_variance, size_variance)
        else assumed_difference() ** 2
    end as equal_variance,
    case when has_evidence then standard_error(n_pairs, n_sessions, variance, equal_variance) end
        as log_error,
    n_pairs + 3 as degrees
from differences
left join equal_sizes using (device, kind, work_key)
left join equal_parts using (device, kind, part)
left join equal_kinds using (device, kind);
