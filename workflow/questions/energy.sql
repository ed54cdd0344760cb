-- What energy does a step take, and a thousand tokens? Steps with evidence come first.
select device, shape, variant, checkpoint, cuda_graph, round(step_ms, 2) as time_ms,
    round(energy_j, 2) as joules, round(1000 * energy_j / step_ms) as mean_power_w,
    round(1000 * energy_j / (batch * (n_context + n_target)), 2) as j_per_thousand_tokens, valid
from step_summary
where energy_j is not null and valid is distinct from false
order by device asc, shape asc, valid desc nulls last, energy_j asc;
