-- What did `auto` choose, and what did the choice cost?
select device, op, shape, chosen, source, best_implementation,
    round(100 * regret_of_choice, 1) as cost_percent
from auto_regret
order by all;
