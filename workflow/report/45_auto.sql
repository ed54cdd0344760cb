-- # What the automatic choice costs
-- `auto` takes for each operator what a table says is fastest. Cost is how much slower its choice
-- is than the best of what it could have chosen, forward and backward together. "nearest" means
-- that the table has no entry of this size, "default" that it has none of this operator.
select
    device,
    source as table_entry,
    count(*) as choices,
    count(*) filter (where chosen = best_implementation) as chose_the_fastest,
    format('{:.1f} %', 100 * max(regret_of_choice)) as highest_cost
from auto_regret
group by device, source
order by device, source;
