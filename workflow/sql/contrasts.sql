-- Grain: figure × device × own × base: the ratios that each figure shows: how many times as fast
-- `own` is (`ratio`), its 95 % interval, and a verdict.
--
-- Figures `speedup` and `operator_speedup` compare with the baseline, and with the fastest of
-- PyTorch and other packages. Bases that were timed beside `own` are ranked by their ratios to it,
-- because sessions differ in speed. Any other two are ranked by the medians of all their runs.
-- Among bases within 1 % of the fastest, one with evidence comes first, then one that was timed
-- beside `own`. An invalid contender is never compared. If its median is more than 2 % shorter than
-- the median of every valid contender, nothing at these sizes has a ratio to the fastest. Of the
-- 2 %, 1 % is the difference that matters, and two GPUs of one model differ by as much. `ablation`
-- compares steps with and without one component, beside the code version of the whole variant that
-- was timed beside the step. `fused_backward` compares our step with attention's backward pass in
-- one launch with our step that has it in two passes. `language_models` compares ours with each
-- other form that took turns with it. `noise` compares equal things. `regressions` compares
-- successive code versions by their ratios to a third contender that did not change, the control.
--
-- Something compared with itself has no error. Steps that share no session have no error either:
-- their medians are compared, in the ablation only where evidence is missing.
--
-- `p` is the probability of so large a ratio, up or down, if the true one were 1 % from 1. `q` is p
-- corrected for all that the figure shows on the device (Benjamini and Hochberg). `faster` and
-- `slower`: q < 0.05, and the interval lies beyond 1 by more than 1 %. `same`: the interval lies
-- within 1 % of 1. Anything else is `ambiguous`, and null without evidence.
create or replace table contrasts as
with considered as (
    select
        candidates.* exclude (own_has_evidence, log_ratio_of_medians, is_same_model),
        estimates.own is not null or candidates.own = candidates.base as is_paired,
        is_paired or (candidates.kind = 'step' and base_is_comparable) as is_compared,
        coalesce(
            estimates.has_evidence, candidates.own = candidates.base and own_has_evidence
        ) as has_evidence,
        coalesce(estimates.log_ratio, log_ratio_of_medians) as log_ratio,
        estimates.log_error,
        estimates.degrees,
        estimates.n_pairs,
        estimates.n_sessions
    from candidates
    left join estimates using (own, base)
    where is_paired or is_same_model
),

-- hides_fastest: the base is invalid, and would be the fastest if it were valid.
weighed as (
    select
        *,
        not base_is_comparable
        and coalesce(
            base_log_ms + 2 * margin()
            < min(base_log_ms) filter (where base_is_comparable) over (partition by own),
            true
        ) as hides_fastest
    from considered
    where for_speedup
),

-- A base is beaten beside `own` by pairs. It is beaten by a median too if one of the two has no
-- pairs. The base of the least median that is not beaten beside `own` is never beaten.
eligible as (
    select
        *,
        is_paired
        and log_ratio
        > margin() + min(log_ratio) filter (where is_paired) over (partition by own)
            as is_beaten_beside
    from weighed
    where base_is_comparable or hides_fastest
),

ranked as (
    select
        *,
        is_beaten_beside
        or coalesce(
            base_log_ms
            > margin()
            + case
                when is_paired
                    then min(base_log_ms) filter (where not is_paired) over (partition by own)
                else
                    min(base_log_ms) filter (where not is_beaten_beside) over (partition by own)
            end,
            false
        ) as is_beaten
    from eligible
),

speedups as (
    select
        * replace (case when is_compared then log_ratio end as log_ratio),
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
        * exclude (against_baseline),
        'ablation' as figure
    from considered
    where ablated is not null and (is_paired or is_compared and not both_have_evidence)
    qualify
        row_number()
            over (
                partition by ablated
                order by is_paired desc, has_evidence desc, are_current desc, own asc, base asc
            )
        = 1
),

fused_backwards as (
    select
        * exclude (against_baseline),
        'fused_backward' as figure
    from considered
    where for_fused_backward and is_paired
),

language_forms as (
    select
        estimates.*,
        'language_models' as figure
    from estimates
    inner join contenders on estimates.own = contenders.code_version
    where estimates.kind = 'generation' and contenders.role = 'own' and contenders.is_current
),

equals as (
    select
        *,
        'noise' as figure
    from estimates
    where equal
),

-- Chooses among several controls the one with most pairs, PyTorch's plain form first.
successors as (
    select
        'regressions' as figure,
        later.device,
        later.kind,
        contenders.code_version as own,
        contenders.previous_code_version as base,
        later.base as control,
        later.has_evidence and earlier.has_evidence as has_evidence,
        later.log_ratio - earlier.log_ratio as log_ratio,
        sqrt(later.log_error ** 2 + earlier.log_error ** 2) as log_error,
        least(later.degrees, earlier.degrees) as degrees,
        least(later.n_pairs, earlier.n_pairs) as n_pairs,
        least(later.n_sessions, earlier.n_sessions) as n_sessions
    from contenders
    inner join estimates as later on contenders.code_version = later.own
    inner join estimates as earlier
        on contenders.previous_code_version = earlier.own and later.base = earlier.base
    inner join contenders as control on later.base = control.code_version
    qualify
        row_number()
            over (
                partition by contenders.code_version
                order by
                    least(later.has_evidence, earlier.has_evidence) desc,
                    control.role = 'baseline' desc,
                    least(later.n_pairs, earlier.n_pairs) desc,
                    later.base asc
            )
        = 1
),

tested as (
    select
        *,
        log_ratio - student_quantile(degrees) * log_error as log_low,
        log_ratio + student_quantile(degrees) * log_error as log_high,
        student_tail((abs(log_ratio) - margin()) / log_error, degrees)
        + student_tail((abs(log_ratio) + margin()) / log_error, degrees) as p
    from (
        from speedups
        union all by name
        from ablations
        union all by name
        from fused_backwards
        union all by name
        from language_forms
        union all by name
        from equals
        union all by name
        from successors
    ) as compared
),

ordered as (
    select
        *,
        p
        * count(p) over (partition by figure, device)
        / row_number() over (partition by figure, device order by p) as p_by_place
    from tested
),

corrected as (
    select
        *,
        case
            when p is not null
                then
                    least(
                        1, min(p_by_place) over (partition by figure, device order by p desc)
                    )
        end as q
    from ordered
)

select
    figure,
    device,
    kind,
    own,
    base,
    against_baseline,
    against_best,
    control,
    has_evidence,
    log_ratio,
    log_error,
    degrees,
    n_pairs,
    n_sessions,
    p,
    q,
    exp(log_ratio) as ratio,
    exp(log_low) as low,
    exp(log_high) as high,
    case
        when log_error is null then null
        when q < 0.05 and log_low > margin() then 'faster'
        when q < 0.05 and log_high < -margin() then 'slower'
        when log_low > -margin() and log_high < margin() then 'same'
        else 'ambiguous'
    end as verdict
from corrected;
