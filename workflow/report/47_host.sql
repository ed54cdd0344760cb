-- topic: host
-- # The host's time for an eager call
-- The table has microseconds of the host for one asynchronous call, without a CUDA graph, at a size
-- where the device waits. "Recorded" is a forward pass that autograd records. "Training" has its
-- backward pass. "Chain" is one of many such calls in a row. PyTorch's plain form took turns with
-- it in the same process.
select
    host.device,
    concat(op, ' ', in_words(problem)) as problem,
    pass,
    format('{:.1f}', host_us) as ours_in_µs,
    format('{:.1f}', host_us / times_base) as pytorch_in_µs,
    format('{:.2f}', times_base) as ours_over_pytorch
from host
inner join implementations using (op, implementation)
where with_launches and provider = 'own'
order by host.device, op, problem, pass;
