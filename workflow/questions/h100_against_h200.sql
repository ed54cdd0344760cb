-- How does an H100 compare with an H200? The same question's time on both, each with evidence.
select h100.shape, h100.variant, h100.cuda_graph, round(h100.step_ms, 2) as h100_ms,
    round(h200.step_ms, 2) as h200_ms,
    round(h100.step_ms / h200.step_ms, 2) as h200_is_times_as_fast
from step_summary as h100
inner join step_summary as h200
    using (variant, batch, n_context, n_target, dtype, checkpoint, cuda_graph, optimizer)
where h100.device like '%h100%' and h200.device like '%h200%' and h100.counts and h200.counts
order by h100.shape, h100.step_ms;
