-- topic: noise
-- # How equal things are judged
-- Each pair of equal things is judged by the rules that judge all others. A verdict of faster or
-- slower is wrong here: at most 1 % may be. An interval should contain 1: at least 93 % must.
-- Several pairs of the same two are one comparison. Intervals are wide on purpose, because few runs
-- say little about their own spread ([statistics](../docs/store-and-statistics.md#statistics)). The
-- table counts the shapes where pairs were timed, and names the five with the most comparisons.
with of_shapes as (
    select
        device,
        kind,
        shape,
        count(*) as n_of_shape
    from equal_things
    group by device, kind, shape
)

select
    device,
    kind,
    any_value(n_comparisons) as comparisons,
    any_value(n_called) as called,
    any_value(n_same) as same,
    any_value(n_comparisons - n_containing) as intervals_without_1,
    count(*) as shapes,
    array_to_string(
        list_slice(list(shape || ' ' || n_of_shape order by n_of_shape desc, shape asc), 1, 5), ', '
    ) as largest
from noise_verdicts
inner join of_shapes using (device, kind)
group by device, kind
order by device asc, kind desc;
