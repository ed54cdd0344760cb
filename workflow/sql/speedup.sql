-- Grain: device × question, of whole training steps; the ablation's have a view of their own.
--
-- `speedup` is against the specification's step without switches (role "baseline"), `speedup_best`
-- against the fastest step without an operator of ours. Ratios, 95 % intervals and verdicts are of
-- view `contrasts`. Without interval and verdict is what has no evidence, shares no sitting with
-- what it is compared with, or is compared with itself. Times of `baseline` and `best_pytorch` are
-- of all their runs. `leads`: of ours at these sizes the one that is surest to be fast, by the
-- lower end of its interval against PyTorch's fastest; the fastest where there is no interval.
create or replace view speedup as
with compared as (
    select * from contrasts
    where figure = 'speedup'
)

select
    own.device,
    own.question,
    own.config_id,
    own.study,
    own.shape,
    own.variant,
    own.role,
    own.batch,
    own.n_context,
    own.n_target,
    own.dtype,
    own.checkpoint,
    own.cuda_graph,
    own.status,
    own.reason,
    own.counts,
    own.why_not,
    own.proven,
    own.throttled,
    own.n_runs,
    own.n_failed,
    own.step_ms,
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
    own.role = 'own'
    and row_number()
        over (
            partition by
                own.device, own.batch, own.n_context, own.n_target, own.dtype, own.role
            order by
                own.counts desc nulls last,
                to_best.low desc nulls last,
                own.step_ms asc nulls last
        )
    = 1 as leads
from step_summary as own
left join compared as to_baseline
    on own.generation = to_baseline.own and to_baseline.against_baseline
left join step_summary as baseline on to_baseline.base = baseline.generation
left join compared as to_best on own.generation = to_best.own and to_best.against_best
left join step_summary as best on to_best.base = best.generation
where own.optimizer and own.study != 'ablation';
