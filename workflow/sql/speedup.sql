-- Grain: device × question, of whole training steps; the ablation's have a view of their own.
--
-- `speedup` is against the specification's step without switches (role "baseline"), `speedup_best`
-- against the fastest step without an operator of ours, both under the same versions of torch and
-- triton. Ratios, 95 % intervals and verdicts are of view `contrasts`. Without interval and verdict
-- is what has no evidence, shares no sitting with what it is compared with, or is compared with
-- itself. Times of `baseline` and `best_pytorch` are of all their runs.
--
-- `why_no_speedup`: why a timed step has no `speedup`, in one sentence.
--
-- `fastest`: no step at these sizes is faster by more than 1 %, so that several may be. Those that
-- stand best (macro `standing`) are compared by their ratios to PyTorch's fastest, or by their
-- times where no step has such a ratio. The highest ratio counts 1 % less where it has no interval
-- (`sure`): its two medians may be of two GPUs, and those of one model differ by as much.
--
-- `leads`: of ours at these sizes the one that is surest to be fast. By the same rule it is among
-- the fastest of ours, with 1 % less for each ratio without an interval; of these it is the one
-- whose interval begins highest.
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
        best.role as best_pytorch_role,
        case
            when own.status != 'ok' or to_baseline.ratio is not null then null
            when not own.counts then own.why_not
            when plain.status is null then 'plain PyTorch was not timed'
            when plain.status != 'ok'
                then concat('plain PyTorch could not be timed: ', plain.status)
            when not plain.counts then concat('plain PyTorch does not count: ', plain.why_not)
            when timed_own.flops != timed_plain.flops
                then
                    format(
                        'its work was counted otherwise: {:.3g}, not {:.3g} TFLOP',
                        timed_own.flops / 1e12,
                        timed_plain.flops / 1e12
                    )
            else 'plain PyTorch was timed with other versions of torch or triton'
        end as why_no_speedup,
        standing(own.status, own.counts) as stands
    from step_summary as own
    left join compared as to_baseline
        on own.generation = to_baseline.own and to_baseline.against_baseline
    left join step_summary as baseline on to_baseline.base = baseline.generation
    left join compared as to_best on own.generation = to_best.own and to_best.against_best
    left join step_summary as best on to_best.base = best.generation
    left join step_summary as plain
        on
            own.device = plain.device
            and own.batch = plain.batch
            and own.n_context = plain.n_context
            and own.n_target = plain.n_target
            and own.dtype = plain.dtype
            and plain.role = 'baseline'
            and plain.optimizer
            and plain.study != 'ablation'
            and not (plain.checkpoint or plain.cuda_graph)
    left join contenders as timed_own on own.generation = timed_own.generation
    left join contenders as timed_plain on plain.generation = timed_plain.generation
    where own.optimizer and own.study != 'ablation'
),

ranked as (
    select
        *,
        max(stands) over of_sizes as best_stands,
        speedup_best * case when speedup_best_low is null then exp(-margin()) else 1 end as sure,
        max(sure) over of_equals as highest,
        min(step_ms) over of_equals as shortest,
        max(sure) over of_equals_of_role as highest_of_role
    from compared_steps
    window
        of_sizes as (partition by device, batch, n_context, n_target, dtype),
        of_equals as (partition by device, batch, n_context, n_target, dtype, stands),
        of_equals_of_role as (partition by device, batch, n_context, n_target, dtype, stands, role)
)

select
    * exclude (stands, best_stands, sure, highest, shortest, highest_of_role),
    coalesce(
        stands > 0
        and stands = best_stands
        and case
            when highest is null then step_ms <= shortest * exp(margin())
            else speedup_best * exp(margin()) >= highest
        end,
        false
    ) as fastest,
    role = 'own'
    and row_number()
        over (
            partition by device, batch, n_context, n_target, dtype, role
            order by
                stands desc nulls last,
                sure * exp(margin()) >= highest_of_role desc nulls last,
                speedup_best_low desc nulls last,
                step_ms asc nulls last
        )
    = 1 as leads
from ranked;
