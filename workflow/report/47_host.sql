-- # What an eager call costs the host
-- Microseconds of the host for one call that is launched asynchronously at a size where the device
-- waits, without a CUDA graph. "recorded" is a forward pass that autograd records, "training" has
-- its backward pass, and "chain" is one of many such calls in a row. PyTorch's plain form was timed
-- in turn in the same process, called as a user of PyTorch calls it.
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
