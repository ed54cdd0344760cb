-- topic: operators
-- # The cost of the automatic choice
-- `auto` takes for each operator the fastest implementation of a table. A choice is judged if it
-- and its alternatives were timed beside each other, all with evidence. Cost says how much slower
-- the choice is than the best of them, forward and backward together. "Default" means that the
-- table has neither an entry of this size nor a prediction. Older rows may say "nearest": auto then
-- used the entry of the nearest size.
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
