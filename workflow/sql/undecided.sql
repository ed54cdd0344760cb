-- Grain: figure × device × own × base: ratios that may lie within 1 % of 1 or beyond it, and how
-- many more runs would decide this.
--
-- `n_more_runs` counts pairs of runs in one further session, with the ratio and the variance as
-- they are now. It is null where even 100 would not do.
create or replace view undecided as
with ambiguous as (
    select
        *,
        (log_error ** 2 - session_deviation() ** 2 / n_sessions) * n_pairs as variance
    from contrasts
    where verdict = 'ambiguous'
)

select
    ambiguous.figure,
    ambiguous.device,
    own.comparison_key,
    base.comparison_key as base_comparison_key,
    ambiguous.own,
    ambiguous.base,
    ambiguous.n_pairs,
    ambiguous.n_sessions,
    ambiguous.ratio,
    ambiguous.low,
    ambiguous.high,
    ambiguous.q,
    list_min([
        n for n in range(1, 101)
        if abs(abs(ambiguous.log_ratio) - margin())
        > student_quantile(ambiguous.degrees + n) * sqrt(
            ambiguous.variance / (ambiguous.n_pairs + n)
            + session_deviation() ** 2 / (ambiguous.n_sessions + 1)
        )
    ]) as n_more_runs
from ambiguous
inner join contenders as own on ambiguous.own = own.code_version
inner join contenders as base on ambiguous.base = base.code_version;
