-- # The training step
-- One training step: forward, backward and optimizer. The shape is tasks × (context points, target
-- points). "Plain PyTorch" is the model as anybody would first write it, with PyTorch's
-- FlashAttention. "PyTorch's best" is the fastest that we could make it without a kernel of ours:
-- cuDNN's attention, a hidden width that suits the hardware, nothing computed that reaches no
-- result, `torch.compile`, a CUDA graph where that helps. "Ours" is, among our fastest steps that
-- have evidence, the one whose interval against PyTorch's best begins highest. Its variant stands
-- first; those behind it are as fast, within 1 %. A ratio above 1 says how many times as fast ours
-- is, with its 95 % interval.
-- A ratio has an interval where the two were timed in the same sessions. It may differ a little
-- from the ratio of two times in the table. A ratio without one is of two medians alone.
with gpus as (
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
    where fastest
    group by all
)

select
    device,
    format('{}: {} × ({:,}, {:,})', shape, batch, n_context, n_target) as shape,
    plain_step_ms as "plain_PyTorch,_ms",
    case when best_pytorch_role = 'peer' then best_pytorch_step_ms end as "PyTorch's_best,_ms",
    step_ms as "ours,_ms",
    array_to_string(
        list_prepend(variant, list_filter(variants, lambda name: name != variant)), ', '
    ) as variant,
    coalesce(
        ratio_cell(speedup, speedup_low, speedup_high),
        case
            when plain_step_ms is not null then format('not compared ({})', why_no_speedup)
        end
    ) as against_plain,
    case
        when best_pytorch_role = 'peer'
            then ratio_cell(speedup_best, speedup_best_low, speedup_best_high)
    end as against_best,
    case when best_pytorch_role = 'peer' then verdict_best end as verdict
from speedup
left join gpus using (device)
left join tied using (device, batch, n_context, n_target, dtype)
-- Steps whose sizes vary have a table of their own. The largest GPU comes first, as in figures.
where leads and valid and not varies
order by memory_bytes desc, device asc, n_context asc, n_target asc, batch desc;
