-- How does an H100 compare with an H200? The same question's time on both.
select h100.shape, h100.variant, h100.cuda_graph, h100.step_ms as h100_ms,
    h200.step_ms as h200_ms, h100.step_ms / h200.step_ms as h200_is_times_as_fast
from step_summary as h100
inner join step_summary as h200
    using (variant, batch, n_context, n_target, dtype, checkpoint, cuda_graph, optimizer)
where h100.device like '%h100%' and h200.device like '%h200%'
order by h100.shape, h100.step_ms;
