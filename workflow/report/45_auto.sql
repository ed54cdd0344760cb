-- # What the automatic choice costs
-- `auto` takes for each operator what a table says is fastest. A choice is judged where it and what
-- else it could have been were timed beside each other, and all of these times have evidence. Cost
-- is how much slower the choice is than the best of these, forward and backward together. "nearest"
-- means that the table has no entry of this size, "default" that it has none of this operator.
select
    device,
    source as table_entry,
    count(*) as choices,
    count(regret_of_choice) filter (where has_evidence) as judged,
    count(*) filter (where regret_of_choice = 0 and has_evidence) as of_these_the_fastest,
    format('{:.1f} %', 100 * max(regret_of_choice) filter (where has_evidence)) as highest_cost
from auto_regret
group by device, source
order by device, source;
