-- Grain: own × base: the mean difference of their pairs (`log_ratio`), its standard error and
-- degrees of freedom. Null errors where a row of either has no evidence; such pairs are left out
-- where there are others.
--
-- `equal_variance` is the mean square of what equal things differ by: those of the same sizes. With
-- fewer than 8 such pairs it is that of the same `part` (an operator's pass, or a step's shape),
-- with fewer again that of all operators or all steps of the device. Both are no less than what the
-- few of these sizes show: long calls meet the power limit, short ones do not. With fewer than 8
-- pairs on the device it is what is assumed.
create or replace table estimates as
with equal_sizes as (
    select
        device,
        kind,
        family,
        avg(difference ** 2) as size_variance,
        count(*) as n_size
    from pairs
    where successive and counts
    group by device, kind, family
),

equal_parts as (
    select
        device,
        kind,
        part,
        avg(difference ** 2) as part_variance,
        count(*) as n_part
    from pairs
    where successive and counts
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
        coalesce(bool_or(counts) over (partition by device, own, base), false) as has_evidence
    from pairs
),

differences as (
    select
        device,
        kind,
        part,
        family,
        equal,
        own,
        base,
        has_evidence,
        count(*) as n_pairs,
        count(distinct sitting) as n_sittings,
        avg(difference) as log_ratio,
        coalesce(var_samp(difference), 0) as variance
    from best_evidence
    where coalesce(counts, false) = has_evidence
    group by device, kind, part, family, equal, own, base, has_evidence
)

select
    differences.* exclude (family),
    case
        when n_size >= 8 then size_variance
        when n_part >= 8 then greatest(part_variance, size_variance)
        when n_kind >= 8 then greatest(kind_variance, size_variance)
        else assumed_difference() ** 2
    end as equal_variance,
    case when has_evidence then standard_error(n_pairs, n_sittings, variance, equal_variance) end
        as log_error,
    n_pairs + 3 as degrees
from differences
left join equal_sizes using (device, kind, family)
left join equal_parts using (device, kind, part)
left join equal_kinds using (device, kind);
