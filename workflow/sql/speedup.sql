-- Grain: device × comparison_key, of whole training steps; view `ablation` holds the ablation's.
--
-- `speedup` is against the specification's step without switches (role "baseline"), `speedup_best`
-- against the fastest step without an operator of ours, both under the same versions of torch and
-- triton. Ratios, 95 % intervals and verdicts come from table `contrasts`. There is no interval and
-- no verdict without evidence, without a shared session, and for a step compared with itself. Times
-- of `baseline`, `plain` and `best_pytorch` are over all their runs. `why_no_speedup` says in one
-- sentence why a timed step has no `speedup`.
--
-- Steps with products in 8 bits are less accurate. They compete among themselves: a step in 16 bits
-- has ratios to PyTorch's steps in 16 bits, and a step in 8 bits to all of PyTorch's.
--
-- One rule says who is fastest in each `precision`. `fastest` marks the steps that no step at these
-- sizes beats by more than 1 %. Only the steps with the best evidence there take part. They are
-- compared by their ratios to PyTorch's fastest, or by their times where no step has such a ratio.
-- A ratio without an interval is taken 3 % lower (`sure`), because its two medians may be of two
-- GPUs: H200s took from 75.9 to 78.4 ms for the same step. `leads` marks the one step of ours to
-- name: among the fastest, the one whose interval against PyTorch's fastest begins highest.
-- `winner` marks the one step of all to name: PyTorch's plain form or another form of PyTorch's if
-- it is among the fastest, otherwise the step that leads.
create or replace view speedup as
with compared as (
    select * from contrasts
    where figure = 'speedup'
),

whole_steps as (
    select
        step_summary.*,
        flops,
        not checkpoint and not cuda_graph as is_plain
    from step_summary
    left join contenders using (device, code_version)
    where optimizer and study != 'ablation'
),

compared_steps as (
    select
        own.* exclude (
            code_version, studies, optimizer, step_ms_low, step_ms_high, tflops, mfu,
            environment_id, operators, gates, flops, is_plain
        ),
        plain.step_ms as plain_step_ms,
        baseline.step_ms as baseline_step_ms,
        to_baseline.ratio as speedup,
        to_baseline.low as speedup_low,
        to_baseline.high as speedup_high,
        to_baseline.q,
        to_baseline.verdict,
        to_baseline.n_pairs,
        to_baseline.n_sessions,
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
        coalesce(own.code_version = best.code_version, false) as is_best_pytorch,
        case
            when own.status != 'ok' or to_baseline.ratio is not null then null
            when not own.valid then own.why_not
            when plain.status is null then 'plain PyTorch was not timed'
            when plain.status != 'ok'
                then concat('plain PyTorch could not be timed: ', plain.status)
            when not plain.valid then concat('plain PyTorch is not valid: ', plain.why_not)
            when own.flops != plain.flops
                then
                    format(
                        'its work was counted otherwise: {:.3g}, not {:.3g} TFLOP',
                        own.flops / 1e12,
                        plain.flops / 1e12
                    )
            else 'plain PyTorch was timed with other versions of torch or triton'
        end as why_no_speedup,
        evidence_rank(own.status, own.valid) as evidence_rank
    from whole_steps as own
    left join compared as to_baseline
        on own.code_version = to_baseline.own and to_baseline.against_baseline
    left join step_summary as baseline on to_baseline.base = baseline.code_version
    left join compared as to_best
        on own.code_version = to_best.own and to_best.against_best
    left join step_summary as best on to_best.base = best.code_version
    left join whole_steps as plain
        on
            own.device = plain.device
            and own.batch = plain.batch
            and own.n_context = plain.n_context
            and own.n_target = plain.n_target
            and own.dtype = plain.dtype
            and plain.role = 'baseline'
            and plain.is_plain
),

beside_others as (
    select
        *,
        max(evidence_rank) over of_sizes as best_rank,
        speedup_best * case
            when speedup_best_low is null and not is_best_pytorch then exp(-3 * margin())
            else 1
        end as sure,
        max(sure) over of_equals as highest,
        min(step_ms) over of_equals as shortest,
        max(sure) over of_equals_of_role as highest_of_role,
        coalesce(
            evidence_rank > 0
            and evidence_rank = best_rank
            and case
                when highest is null then step_ms <= shortest * exp(margin())
                else speedup_best * exp(margin()) >= highest
            end,
            false
        ) as fastest
    from compared_steps
    window
        of_sizes as (partition by device, batch, n_context, n_target, dtype, precision),
        of_equals as (
            partition by device, batch, n_context, n_target, dtype, precision, evidence_rank
        ),
        of_equals_of_role as (
            partition by device, batch, n_context, n_target, dtype, precision, evidence_rank, role
        )
),

led as (
    select
        *,
        role = 'own'
        and step_ms is not null
        and row_number()
            over (
                partition by device, batch, n_context, n_target, dtype, precision, role
                order by
                    evidence_rank desc nulls last,
                    fastest desc,
                    sure * exp(margin()) >= highest_of_role desc nulls last,
                    speedup_best_low desc nulls last,
                    step_ms asc nulls last
            )
        = 1 as leads
    from beside_others
)

select
    * exclude (evidence_rank, best_rank, is_best_pytorch, sure, highest, shortest, highest_of_role),
    fastest
    and row_number()
        over (
            partition by device, batch, n_context, n_target, dtype, precision
            order by fastest desc, role = 'own' asc, role asc, leads desc, step_ms asc
        )
    = 1 as winner
from led;
