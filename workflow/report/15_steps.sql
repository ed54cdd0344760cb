-- topic: steps
-- # Every step
-- `variant` is the name in `config.yaml`. Step time is the median of the device's spans from one
-- step's start to its end. Wall time is the whole sampling on the host's clock, from one wait for
-- the device to another, over its steps: a mean, and missing in early rows. Tokens are all points.
-- Energy is of one step, from the GPU's own counter. Memory is the peak during a step. Times are
-- medians over runs, and a run is one process. "Against best" compares with the fastest of
-- PyTorch's rows at this shape; a row in 16 bits is not compared with rows in 8 bits. If it was not
-- timed beside ours, a row within 1 % of it may replace it.
select
    device,
    shape,
    case role
        when 'baseline' then 'plain PyTorch'
        when 'peer' then 'PyTorch'
        else 'ours'
    end as who,
    variant,
    products_in,
    concat_ws(
        ', ',
        case when checkpoint then 'checkpointing' end,
        case when cuda_graph then 'CUDA graph' end
    ) as switches,
    step_ms as "step,_ms",
    step_ms_wall as "wall,_ms",
    tokens_per_s / 1e3 as "thousand_tokens/s",
    ratio_cell(speedup, speedup_low, speedup_high) as against_plain,
    verdict,
    ratio_cell(speedup_best, speedup_best_low, speedup_best_high) as against_best,
    verdict_best,
    energy_j as "energy,_J",
    peak_memory_bytes / pow(2, 30) as "memory,_GiB",
    n_runs as runs,
    evidence_cell(valid, why_not) as evidence
from speedup
order by
    device asc, min(step_ms) over (partition by device, shape) asc, step_ms desc,
    variant asc, checkpoint asc, cuda_graph asc;
