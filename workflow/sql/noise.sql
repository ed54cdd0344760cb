-- Grain: device × kind × part: how far times differ where nothing was changed, as standard
-- deviations of their logarithm (0.01 is 1 %).
--
-- `within_runs`: samples of a typical run. It is the median over runs, because a stall of the host
-- once made one sample of 694 take 619 times as long.
-- `between_runs`: medians of successive runs of a session.
-- `of_equals`: the logarithmic ratio of equal things, from `n_equals` pairs. From 8 pairs on, the
-- intervals of table `contrasts` rest on it.
-- `between_sessions`: a ratio from session to session, with the noise of its runs, from `n_ratios`
-- ratios. Table `contrasts` assumes 0.003 beyond that noise.
create or replace view noise as
with successive_runs as (
    select
        *,
        log_ms - lag(log_ms) over of_contender as change
    from measurements
    where is_comparable
    window
        of_contender as (
            partition by device, code_version, config_id, pass, session
            order by ordinal asc
        )
),

runs as (
    select
        device,
        kind,
        part,
        count(*) as n_runs,
        median(deviation) as within_runs,
        count(change) as n_successive,
        sqrt(avg(change ** 2) / 2) as between_runs -- a difference has twice the variance
    from successive_runs
    group by device, kind, part
),

equals as (
    select
        device,
        kind,
        part,
        count(*) as n_equals,
        sqrt(avg(difference ** 2)) as of_equals
    from pairs
    where successive and valid
    group by device, kind, part
),

ratios_of_sessions as (
    select
        device,
        kind,
        part,
        own,
        base,
        session,
        avg(difference) as log_ratio
    from pairs
    where not equal
    group by all
),

ratios as (
    select
        device,
        kind,
        part,
        var_samp(log_ratio) as variance
    from ratios_of_sessions
    group by device, kind, part, own, base
    having count(*) > 1
),

of_sessions as (
    select
        device,
        kind,
        part,
        count(*) as n_ratios,
        sqrt(avg(variance)) as between_sessions
    from ratios
    group by device, kind, part
)

select
    device,
    kind,
    part,
    n_runs,
    within_runs,
    n_successive,
    between_runs,
    coalesce(n_equals, 0) as n_equals,
    of_equals,
    coalesce(n_ratios, 0) as n_ratios,
    between_sessions
from runs
left join equals using (device, kind, part)
left join of_sessions using (device, kind, part);
