-- Grain: device × run × config_id × pass: every timing but tuning trials, of all generations.
-- `counts` is null where no evidence was kept, and false where the time is known not to count.
--
-- What is in one `family` has equal sizes and dtype and, of operators, equally drawn values. A
-- family holds either throughput or latency. A step's model is known by its operations, `flops`.
-- `part` is what noise is known of: the shape of a step, an operator's name and pass. `shown`:
-- the figures of speed show it; the ablation's steps, forward and backward alone, `auto`, the
-- ceilings and latency have figures or tables of their own or none.
create or replace table timed as
with measured as (
    select
        *,
        'step' as pass,
        'step' as kind,
        shape as part,
        concat_ws(' ', dtype, batch, n_context, n_target, optimizer) as family,
        variant as name,
        concat_ws(
            ' ',
            case when checkpoint then 'checkpoint' end,
            case when cuda_graph then 'cuda_graph' end
        ) as switches,
        case
            when starts_with(variant, 'only_') then 'only'
            when starts_with(variant, 'without_') then 'without'
            when study = 'ablation' then 'whole'
        end as ablation_part,
        optimizer and study != 'ablation' as shown,
        ln(step_ms_p50) as log_ms,
        step_ms_std / step_ms_p50 as deviation
    from judged_steps
    where status = 'ok'
    union all by name
    select
        * exclude (flops),
        'operator' as kind,
        concat_ws(' ', op, pass, nullif(timing, 'throughput')) as part,
        concat_ws(
            ' ',
            op,
            pass,
            dtype,
            batch,
            n_q,
            n_k,
            n_heads,
            head_dim,
            d_model,
            d_ff,
            d_ff_storage,
            n_components,
            case when n_q is null then in_words(problem) end,
            drawn(draw, d_ff),
            nullif(timing, 'throughput')
        ) as family,
        implementation as name,
        '' as switches,
        implementation != 'auto'
        and not is_ceiling(op)
        and coalesce(timing, '') != 'latency' as shown,
        ln(time_ms_p50) as log_ms,
        time_ms_std / time_ms_p50 as deviation
    from judged_ops
    where status = 'ok'
)

select
    device,
    run,
    config_id,
    pass,
    kind,
    part,
    family,
    flops,
    name,
    switches,
    ablation_part,
    shown,
    coalesce(twin, false) as twin,
    log_ms,
    deviation,
    question,
    generation,
    is_current,
    role,
    coalesce(precision, '') as precision,
    counts,
    concat_ws(' ', torch, triton) as versions,
    sitting,
    started_at
from measured;
