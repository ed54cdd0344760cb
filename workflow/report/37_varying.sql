-- topic: steps
-- # Sizes that vary
-- Training steps over a stream of 64 tasks. Sizes are drawn at random for each task, or for each
-- sample at `varying_samples`. A step is the stream's mean. Rows are context and target points
-- without padding. "Padding" is the share of padded rows among the rows that are computed outside
-- attention.
--
-- Sizes are rounded up to buckets. Each bucket has a graph of its own where there are graphs.
-- PyTorch's best is compiled once for all sizes, and not padded without graphs. Variants that end
-- in `_packed` put the samples of a batch one behind the other. `small` and `mid` are the largest
-- sizes of streams `varying` and `varying_mid`.
with streams as (
    select distinct device
    from step_summary
    where varies
)

select
    device,
    shape,
    variant,
    cuda_graph as graph,
    step_ms as "step,_ms",
    tokens_per_s / 1e6 as million_rows_a_second,
    format('{:.0f} %', 100 * padded_share) as padding,
    peak_memory_bytes / pow(2, 30) as "memory,_GiB",
    ratio_cell(speedup_best, speedup_best_low, speedup_best_high) as against_best,
    verdict_best,
    n_pairs_best as pairs,
    n_runs as runs,
    evidence_cell(valid, why_not) as evidence
from speedup
inner join streams using (device)
where
    not checkpoint
    and (
        varies
        or (shape in ('small', 'mid') and cuda_graph and variant in ('fused', 'pytorch_best'))
    )
order by device asc, n_target < 1000 desc, shape desc, cuda_graph desc, step_ms desc;
