-- What is fastest at each shape on a card of 40 GB? Steps with evidence go before others.
-- Steps in 8 bits have rows of their own. 2 GB are left to the driver and to other programs.
select device, shape, variant, products_in, checkpoint, cuda_graph, round(step_ms, 2) as time_ms,
    round(peak_memory_bytes / pow(2, 30), 1) as memory_gib, valid
from step_summary
where memory_gib < 38 and status = 'ok' and optimizer and valid is distinct from false
qualify row_number() over (
    partition by device, batch, n_context, n_target, precision
    order by valid desc nulls last, step_ms asc
) = 1
order by device, step_ms;
