-- Grain: two equal things that were compared as if they were different: two copies of an
-- implementation in one job, or two runs of a step in one sitting.
--
-- `ratio` is how many times as fast the one seemed, with the 95 % interval `low` to `high`. It is
-- 1 in truth: any `verdict` of faster or slower is wrong, and `contains_1` should mostly be true.
-- `part` is a step's shape or an operator's name and pass, `name` its variant or implementation.
create or replace view equal_things as
with shapes as (
    select distinct
        device,
        config_id,
        shape
    from ops
),

things as (
    select
        timings.generation,
        any_value(timings.part) as part,
        any_value(timings.name) as name,
        any_value(coalesce(shapes.shape, timings.part)) as shape
    from timings
    left join shapes using (device, config_id)
    group by timings.generation
)

select
    contrasts.device,
    contrasts.kind,
    things.part,
    things.shape,
    things.name,
    contrasts.own,
    contrasts.base,
    contrasts.n_pairs,
    contrasts.ratio,
    contrasts.low,
    contrasts.high,
    contrasts.verdict,
    contrasts.low <= 1 and contrasts.high >= 1 as contains_1
from contrasts
inner join things on split_part(contrasts.base, ' ', 1) = things.generation
where contrasts.figure = 'noise' and contrasts.has_evidence;
