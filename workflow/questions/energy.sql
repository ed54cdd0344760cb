-- What energy does a step take, and a thousand tokens?
select device, shape, variant, cuda_graph, step_ms, energy_j,
    energy_j / step_ms * 1000 as mean_power_w,
    1000 * energy_j / (batch * (n_context + n_target)) as j_per_thousand_tokens
from step_summary
where energy_j is not null
order by device, shape, energy_j;
