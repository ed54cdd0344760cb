-- Grain: device × config_id × pass × resample: medians of a hierarchical bootstrap, in ms.
--
-- A resample draws as many replicates as there are, with replacement, resamples the timings within
-- each, and takes the median of their medians. The median of n timings drawn with replacement is
-- the timing at rank u of the sorted ones, u the median of n uniform numbers: Beta((n + 1) / 2,
-- (n + 1) / 2), here by its normal limit of standard deviation 1 / (2 √(n + 2)). So one draw
-- stands for n. A table, not a view: hash() makes the draws, and what it returns may change with
-- DuckDB's version.
create or replace table resamples as
with measured as (
    select
        device,
        config_id,
        replicate,
        recorded_at,
        origin,
        'step' as pass
    from current_steps
    where status = 'ok'
    union all
    select
        device,
        config_id,
        replicate,
        recorded_at,
        origin,
        pass
    from current_ops
    where status = 'ok'
),

timings as (
    select
        device,
        config_id,
        pass,
        replicate,
        list(time_ms order by time_ms) as sorted_ms
    from measured
    inner join samples using (device, config_id, replicate, recorded_at, origin, pass)
    group by all
),

configurations as (
    select
        device,
        config_id,
        pass,
        list(sorted_ms order by replicate) as replicates
    from timings
    group by all
),

numbers as (
    select unnest(range(1000)) as resample
),

draws as (
    select
        *,
        unnest(range(len(replicates))) as draw,
        concat_ws(' ', device, config_id, pass, resample, draw) as resample_key
    from configurations
    cross join numbers
),

-- Of one text each: hash() of several values leaves those that differ in one value correlated.
uniform as (
    select
        * exclude (resample_key),
        (hash(resample_key || 'replicate') + 0.5) / pow(2, 64) as u_replicate,
        (hash(resample_key || 'radius') + 0.5) / pow(2, 64) as u_radius,
        (hash(resample_key || 'angle') + 0.5) / pow(2, 64) as u_angle
    from draws
),

normal as (
    select
        *,
        sqrt(-2 * ln(u_radius)) * cos(2 * pi() * u_angle) as z,
        replicates[1 + least(len(replicates) - 1, floor(u_replicate * len(replicates)))::bigint]
            as drawn_ms
    from uniform
),

ranked as (
    select
        *,
        floor((0.5 + z / (2 * sqrt(len(drawn_ms) + 2))) * len(drawn_ms))::bigint as rank_below
    from normal
)

select
    device,
    config_id,
    pass,
    resample,
    median(drawn_ms[1 + greatest(0, least(len(drawn_ms) - 1, rank_below))]) as time_ms
from ranked
group by all;
