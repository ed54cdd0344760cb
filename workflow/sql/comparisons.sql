-- Grain: figure × device × own × base: what each figure compares, with the estimate of it.
--
-- Figures `speedup` and `operator_speedup` compare with the baseline, and with the fastest of
-- PyTorch and other packages under the same versions of torch and triton, by all its runs. A slower
-- one never stands in for it because only the slower was timed beside `own` or has evidence, but
-- one within 1 % of the fastest does. What is known not to count is never compared. Where its
-- median is shorter by more than 2 % than all that may count, nothing at these sizes has a ratio to
-- the fastest; otherwise the fastest is one that may count. Of the 2 %, 1 % is the difference that
-- matters, and two GPUs of one model differ by as much. Who computes in a narrower format than the
-- problem's dtype is a peer of those alone that do so too.
--
-- `ablation` compares steps with and without one component: of the whole variant that generation
-- which was timed beside the component's step. `noise` compares equal things. `regressions`
-- compares successive generations, by their ratios to a third that did not change, the control.
--
-- What is compared with itself has no error. Nor have steps that share no sitting: of these the
-- medians are compared; the ablation does that only where evidence is missing.
create or replace view comparisons as
with candidates as (
    select
        own.device,
        own.kind,
        own.generation as own,
        base.generation as base,
        base.role = 'baseline' and base.switches = '' and base.may_count as against_baseline,
        own.is_current
        and base.is_current
        and own.shown
        and base.shown
        and base.role != 'own'
        and base.precision in ('', own.precision)
            as for_speedup,
        case
            when own.switches != base.switches
                then null
            when own.ablation_part = 'only' and base.ablation_part = 'whole'
                then case when own.is_current and base.role != 'own' then own.generation end
            when own.ablation_part = 'whole' and base.ablation_part = 'without'
                then case when base.is_current and own.role = 'own' then base.generation end
        end as ablated,
        own.is_current and base.is_current as are_current,
        own.has_evidence and base.has_evidence as both_have_evidence,
        base.may_count as base_may_count,
        base.log_ms as base_log_ms,
        estimates.own is not null or own.generation = base.generation as is_paired,
        is_paired or (own.kind = 'step' and base.may_count) as is_compared,
        coalesce(
            estimates.has_evidence, own.generation = base.generation and own.has_evidence
        ) as has_evidence,
        coalesce(estimates.log_ratio, base.log_ms - own.log_ms) as log_ratio,
        estimates.log_error,
        estimates.degrees,
        estimates.n_pairs,
        estimates.n_sittings
    from contenders as own
    inner join contenders as base
        on
            own.device = base.device
            and own.family = base.family
            and own.versions = base.versions
    left join estimates
        on own.generation = estimates.own and base.generation = estimates.base
    where
        own.may_count
        and (for_speedup or ablated is not null)
        and (is_paired or own.flops is not distinct from base.flops)
),

-- hides_fastest: the base does not count, and would be the fastest if it did.
weighed as (
    select
        *,
        not base_may_count
        and coalesce(
            base_log_ms + 2 * margin()
            < min(base_log_ms) filter (where base_may_count) over (partition by own),
            true
        ) as hides_fastest
    from candidates
    where for_speedup
),

ranked as (
    select
        *,
        log_ratio > margin() + min(log_ratio) over (partition by own) as is_beaten
    from weighed
    where base_may_count or hides_fastest
),

speedups as (
    select
        * exclude (
            for_speedup, ablated, are_current, both_have_evidence, base_may_count, base_log_ms,
            is_paired, is_compared, hides_fastest, is_beaten
        )
        replace (case when is_compared then log_ratio end as log_ratio),
        case kind when 'step' then 'speedup' else 'operator_speedup' end as figure,
        row_number()
            over (
                partition by own
                order by
                    hides_fastest desc,
                    is_beaten asc,
                    has_evidence desc,
                    is_paired desc,
                    log_ratio asc,
                    base asc
            )
        = 1 as against_best
    from ranked
    qualify against_baseline or against_best
),

ablations as (
    select
        * exclude (
            for_speedup, ablated, are_current, both_have_evidence, base_may_count, base_log_ms,
            is_paired, is_compared, against_baseline
        ),
        'ablation' as figure
    from candidates
    where ablated is not null and (is_paired or is_compared and not both_have_evidence)
    qualify
        row_number()
            over (
                partition by ablated
                order by is_paired desc, has_evidence desc, are_current desc, own asc, base asc
            )
        = 1
),

equals as (
    select
        * exclude (equal, part, variance, equal_variance),
        'noise' as figure
    from estimates
    where equal
),

-- Of several controls the one with most pairs, PyTorch's plain form first.
regressions as (
    select
        'regressions' as figure,
        later.device,
        later.kind,
        contenders.generation as own,
        contenders.previous_generation as base,
        later.base as control,
        later.has_evidence and earlier.has_evidence as has_evidence,
        later.log_ratio - earlier.log_ratio as log_ratio,
        sqrt(later.log_error ** 2 + earlier.log_error ** 2) as log_error,
        least(later.degrees, earlier.degrees) as degrees,
        least(later.n_pairs, earlier.n_pairs) as n_pairs,
        least(later.n_sittings, earlier.n_sittings) as n_sittings
    from contenders
    inner join estimates as later on contenders.generation = later.own
    inner join estimates as earlier
        on contenders.previous_generation = earlier.own and later.base = earlier.base
    inner join contenders as control on later.base = control.generation
    qualify
        row_number()
            over (
                partition by contenders.generation
                order by
                    least(later.has_evidence, earlier.has_evidence) desc,
                    control.role = 'baseline' desc,
                    least(later.n_pairs, earlier.n_pairs) desc,
                    later.base asc
            )
        = 1
)

from speedups
union all by name
from ablations
union all by name
from equals
union all by name
from regressions;
