-- # The training step
-- One training step is forward pass, backward pass and optimizer. A shape is tasks × (context
-- points, target points).
--
-- "Plain PyTorch" is the model as anybody would first write it, with PyTorch's FlashAttention.
-- "PyTorch's best" is the fastest that we could make it without a kernel of ours: cuDNN's
-- attention, a padded hidden width, no unread rows, `torch.compile`, and a CUDA graph where that
-- helps. "Ours" is the step of ours that is surest to be fast: the interval of its ratio to
-- PyTorch's best begins highest. Its variant is named first; variants behind it are within 1 %.
--
-- A ratio above 1 says how many times as fast ours is. Ratios with an interval come from runs made
-- together on one GPU. The times are medians of all runs, so dividing them may give a slightly
-- different ratio.
with ours as (
    from speedup
    -- Steps whose sizes vary have a table of their own.
    where leads and counts and not varies
),

-- The largest GPU first, as in the figures.
sizes as (
    select
        device,
        max(memory_bytes) as memory_bytes
    from environments
    group by device
),

tied as (
    select
        device,
        batch,
        n_context,
        n_target,
        dtype,
        list(distinct variant order by variant) as variants
    from speedup
    where fastest and role = 'own'
    group by all
)

select
    ours.device,
    format('{}: {} × ({:,}, {:,})', ours.shape, ours.batch, ours.n_context, ours.n_target) as shape,
    plain.step_ms as "plain_PyTorch,_ms",
    case when ours.best_pytorch_role = 'peer' then ours.best_pytorch_step_ms end
        as "PyTorch's_best,_ms",
    ours.step_ms as "ours,_ms",
    concat_ws(
        ', ',
        ours.variant,
        nullif(
            array_to_string(
                list_filter(tied.variants, lambda name: name != ours.variant), ', '
            ),
            ''
        )
    ) as variant,
    coalesce(
        ratio_cell(ours.speedup, ours.speedup_low, ours.speedup_high),
        case
            when plain.step_ms is not null
                then
                    format('not compared ({})', ours.why_no_speedup)
        end
    ) as against_plain,
    case
        when ours.best_pytorch_role = 'peer'
            then ratio_cell(ours.speedup_best, ours.speedup_best_low, ours.speedup_best_high)
    end as against_best,
    case when ours.best_pytorch_role = 'peer' then ours.verdict_best end as verdict
from ours
left join sizes on ours.device = sizes.device
left join tied
    on
        ours.device = tied.device
        and ours.batch = tied.batch
        and ours.n_context = tied.n_context
        and ours.n_target = tied.n_target
        and ours.dtype = tied.dtype
left join speedup as plain
    on
        ours.device = plain.device
        and ours.batch = plain.batch
        and ours.n_context = plain.n_context
        and ours.n_target = plain.n_target
        and ours.dtype = plain.dtype
        and plain.role = 'baseline'
        and not (plain.checkpoint or plain.cuda_graph)
order by
    sizes.memory_bytes desc,
    ours.device asc,
    ours.n_context asc,
    ours.n_target asc,
    ours.batch desc;
