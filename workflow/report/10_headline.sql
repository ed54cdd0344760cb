-- # The training step
-- One training step: forward, backward and optimizer. The shape is tasks × (context points, target
-- points). "PyTorch, plain" is the model as anybody would first write it, with PyTorch's
-- FlashAttention. "PyTorch, best" is the fastest that we could make it without a kernel of ours:
-- cuDNN's attention, a hidden width that suits the hardware, nothing computed that reaches no
-- result, `torch.compile`, a CUDA graph where that helps. "tnp" is our fastest. A ratio above 1
-- says how many times as fast tnp is, with its 95 % interval. Where it is missing, one of the two
-- rows cannot be compared; the next table says why.
with ours as (
    from speedup
    where role = 'own' and counts
    qualify row_number() over (partition by device, batch, n_context, n_target order by step_ms) = 1
)

select
    ours.device,
    format('{}: {} × ({:,}, {:,})', shape, batch, n_context, n_target) as shape,
    plain.step_ms as "PyTorch_plain,_ms",
    ours.best_pytorch_step_ms as "PyTorch_best,_ms",
    ours.step_ms as "tnp,_ms",
    ratio_cell(ours.speedup, ours.speedup_low, ours.speedup_high) as against_plain,
    ratio_cell(ours.speedup_best, ours.speedup_best_low, ours.speedup_best_high) as against_best,
    ours.verdict_best as verdict
from ours
left join speedup as plain
    using (device, shape, batch, n_context, n_target, dtype)
where plain.role = 'baseline' and not plain.checkpoint and not plain.cuda_graph
order by ours.device, ours.step_ms;
