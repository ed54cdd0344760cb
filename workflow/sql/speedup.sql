-- Grain: device × question, of whole training steps; the ablation's have a view of their own.
--
-- `speedup` is against the specification's step without switches (role "baseline"), `speedup_best`
-- against the fastest step without an operator of ours, both under the same versions of torch and
-- triton. Ratios, 95 % intervals and verdicts are of view `contrasts`. Without interval and verdict
-- is what has no evidence, shares no sitting with what it is compared with, or is compared with
-- itself. Times of `baseline` and `best_pytorch` are of all their runs.
--
-- `leads`: of ours at these sizes the one that is surest to be fast. Those are in question that
-- stand best (macro `standing`) and whose ratio to PyTorch's fastest is within 1 % of the highest;
-- of these it is the one whose interval begins highest. A ratio without an interval counts 1 % less
-- (`sure`): its two medians may be of two GPUs, and those of one model differ by as much.
create or replace view speedup as
with compared as (
    select * from contrasts
    where figure = 'speedup'
),

compared_steps as (
    select
        own.* exclude (
            generation, studies, optimizer, step_ms_low, step_ms_high, tokens_per_s, energy_j,
            peak_memory_bytes, tflops, mfu, environment_id, operators, gates
        ),
        baseline.step_ms as baseline_step_ms,
        to_baseline.ratio as speedup,
        to_baseline.low as speedup_low,
        to_baseline.high as speedup_high,
        to_baseline.q,
        to_baseline.verdict,
        to_baseline.n_pairs,
        to_baseline.n_sittings,
        best.variant as best_pytorch_variant,
        best.checkpoint as best_pytorch_checkpoint,
        best.cuda_graph as best_pytorch_cuda_graph,
        best.step_ms as best_pytorch_step_ms,
        to_best.ratio as speedup_best,
        to_best.low as speedup_best_low,
        to_best.high as speedup_best_high,
        to_best.q as q_best,
        to_best.verdict as verdict_best,
        to_best.n_pairs as n_pairs_best,
        best.role as best_pytorch_role
    from step_summary as own
    left join compared as to_baseline
        on own.generation = to_baseline.own and to_baseline.against_baseline
    left join step_summary as baseline on to_baseline.base = baseline.generation
    left join compared as to_best on own.generation = to_best.own and to_best.against_best
    left join step_summary as best on to_best.base = best.generation
    where own.optimizer and own.study != 'ablation'
),

ranked as (
    select
        *,
        standing(status, counts) as stands,
        speedup_best * case when speedup_best_low is null then exp(-margin()) else 1 end as sure,
        max(sure)
            over (
                partition by
                    device, batch, n_context, n_target, dtype, role, standing(status, counts)
            ) as highest
    from compared_steps
)

select
    * exclude (stands, sure, highest),
    role = 'own'
    and row_number()
        over (
            partition by device, batch, n_context, n_target, dtype, role
            order by
                stands desc nulls last,
                sure * exp(margin()) >= highest desc nulls last,
                speedup_best_low desc nulls last,
                step_ms asc nulls last
        )
    = 1 as leads
from ranked;
