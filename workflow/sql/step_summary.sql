-- Grain: device × question: medians over the runs of the current generation.
--
-- Over the runs that count; where none does, over those without evidence; where all are known not
-- to count, over these. `counts` and `why_not` say which it was. `status` and `reason` are those of
-- a failure where no run was timed; `n_failed` counts the others. `step_ms_low` and `_high` are the
-- shortest and the longest run. `mfu` is of the matmul ceiling. It and `tflops` are null where
-- `skip_unread` left out work that the rows count nevertheless, as the first ones did. `varies` is
-- true of streams of tasks whose sizes vary, and of what failed at such a shape.
create or replace view step_summary as
with runs as (
    select
        * exclude (tflops, mfu),
        status = 'ok' as timed,
        case
            when
                coalesce(gates, '') not like '%skip_unread%'
                or tflops * step_ms_p50
                < 0.999 * flops / 1e9
                then tflops * step_ms_p50
        end as work,
        coalesce(
            varies,
            -- The first rows of streams do not say it.
            max(padded_share) over (partition by device, shape) > 0,
            false
        ) as is_stream,
        coalesce(
            standing(status, counts)
            = max(standing(status, counts))
                over (partition by device, question),
            false
        ) as is_used
    from current_steps
)

select
    device,
    question,
    bool_or(is_stream) as varies,
    any_value(columns([
        'generation', 'shape', 'variant', 'role', 'batch', 'n_context', 'n_target', 'dtype',
        'checkpoint', 'cuda_graph', 'optimizer'
    ])),
    min(config_id) as config_id,
    list(distinct study order by study) as studies,
    coalesce(min(study) filter (where study != 'ablation'), 'ablation') as study,
    case when bool_or(timed) then 'ok' else arg_max(status, recorded_at) end as status,
    coalesce(
        arg_max(reason, recorded_at) filter (where is_used and reason != ''),
        arg_max(reason, recorded_at) filter (where reason != '')
    ) as reason,
    any_value(counts) filter (where is_used) as counts,
    any_value(proven) filter (where is_used) as proven,
    arg_max(why_not, recorded_at) filter (where is_used or not timed) as why_not,
    count(*) filter (where is_used) as n_runs,
    count(*) filter (where not timed) as n_failed,
    median(step_ms_p50) filter (where is_used) as step_ms,
    min(step_ms_p50) filter (where is_used) as step_ms_low,
    max(step_ms_p50) filter (where is_used) as step_ms_high,
    median(tokens_per_s) filter (where is_used) as tokens_per_s,
    max(peak_memory_bytes) filter (where timed) as peak_memory_bytes,
    median(energy_j) filter (where is_used) as energy_j,
    median(padded_share) filter (where is_used) as padded_share,
    arg_max(work, recorded_at) filter (where is_used)
    / median(step_ms_p50) filter (where is_used) as tflops,
    tflops / any_value(ceiling_tflops) as mfu,
    bool_or(throttled) filter (where is_used) as throttled,
    arg_max(environment_id, recorded_at) as environment_id,
    arg_max(operators, recorded_at) as operators,
    arg_max(gates, recorded_at) as gates
from runs
left join ceilings using (device)
group by device, question;
