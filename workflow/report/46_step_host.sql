-- topic: host
-- # The host's time for a training step
-- Host time is the time from the call of a step until it returns, on an idle GPU. Step time is that
-- of a step in a loop. If both are nearly equal, the GPU waits for the host. All forms of a shape
-- took turns in one process, on the processor that is named. Two ratios follow. The first divides
-- the host time by the host time of PyTorch's fastest form without a CUDA graph. The second divides
-- the step time by the step time of the same variant with a CUDA graph.
select
    device,
    coalesce(processor, 'unknown') as processor,
    shape,
    concat(variant, if(cuda_graph, ' as a graph', '')) as form,
    if(status = 'ok', format('{:.2f}', host_ms), status) as host_in_ms,
    format('{:.2f}', step_ms) as loop_in_ms,
    format('{:.2f}', over_pytorch) as host_over_pytorch,
    format('{:.2f}', over_graph) as loop_over_graph,
    if(status = 'ok', if(waits_for_host, 'the host', 'the GPU'), null) as waits_for
from step_host
where device <> 'cpu'
order by device, processor, shape, role, variant, cuda_graph;
