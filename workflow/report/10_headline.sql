-- # The training step
-- One training step is forward pass, backward pass and optimizer. A shape is tasks × (context
-- points, target points).
--
-- "Plain PyTorch" is the model as anybody would first write it, with PyTorch's FlashAttention.
-- "PyTorch's best" is the fastest that we could make it without a kernel of ours: cuDNN's
-- attention, a padded hidden width, no unread rows, `torch.compile`, and a CUDA graph where that
-- helps. "Ours" is the step of ours in 16 bits that is surest to be fast: the interval of its ratio
-- to PyTorch's best begins highest.
--
-- Tokens/s are tasks × (context + target points) over the step time. A ratio above 1 says how many
-- times as fast ours is. Ratios with an interval come from runs made together on one GPU. The times
-- are medians of all runs, so dividing them may give a slightly different ratio.
with gpus as (
    select
        device,
        max(memory_bytes) as memory_bytes
    from environments
    group by device
)

select
    device,
    format('{}: {} × ({:,}, {:,})', shape, batch, n_context, n_target) as shape,
    plain_step_ms as "plain_PyTorch,_ms",
    of_peer(best_pytorch_role, best_pytorch_step_ms) as "PyTorch's_best,_ms",
    step_ms as "ours,_ms",
    tokens_per_s / 1e3 as "ours,_thousand_tokens/s",
    variant,
    coalesce(
        ratio_cell(speedup, speedup_low, speedup_high),
        case
            when plain_step_ms is not null then format('not compared ({})', why_no_speedup)
        end
    ) as against_plain,
    of_peer(best_pytorch_role, ratio_cell(speedup_best, speedup_best_low, speedup_best_high))
        as against_best,
    of_peer(best_pytorch_role, verdict_best) as verdict_against_best
from speedup
left join gpus using (device)
-- Steps whose sizes vary have a table of their own, and batches that were timed for their memory
-- have no step of PyTorch's beside them. The largest GPU comes first, as in figures.
where leads and valid and not varies and precision = '' and best_pytorch_step_ms is not null
order by
    memory_bytes desc, device asc, n_context asc, n_target asc, batch desc;
