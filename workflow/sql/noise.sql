-- Grain: device × kind × part: by how much times differ where nothing was changed, as standard
-- deviations of their logarithm (0.01 is 1 %).
--
-- `within_runs` is of the samples of a typical run: the median of all runs', since a stall of the
-- host once made one sample of 694 take 619 times as long. `between_runs` is of the medians of
-- successive runs of a sitting, `of_equals` of the logarithmic ratio of equal things, from
-- `n_equals` pairs: with at least 8 of them, the intervals of view `contrasts` rest on it.
-- `between_sittings` is what a ratio differs by from sitting to sitting, its runs' own noise
-- included, from `n_ratios` ratios of several sittings; view `contrasts` assumes 0.003 beyond that
-- noise.
create or replace view noise as
with successive_runs as (
    select
        *,
        log_ms - lag(log_ms) over of_contender as step
    from timings
    window
        of_contender as (
            partition by device, generation, config_id, pass, sitting
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
        count(step) as n_successive,
        sqrt(avg(step ** 2) / 2) as between_runs
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
    where successive and counts
    group by device, kind, part
),

ratios_of_sittings as (
    select
        device,
        kind,
        part,
        own,
        base,
        sitting,
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
    from ratios_of_sittings
    group by device, kind, part, own, base
    having count(*) > 1
),

sittings_apart as (
    select
        device,
        kind,
        part,
        count(*) as n_ratios,
        sqrt(avg(variance)) as between_sittings
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
    between_sittings
from runs
left join equals using (device, kind, part)
left join sittings_apart using (device, kind, part);
