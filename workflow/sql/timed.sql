-- Grain: device × run × config_id × pass: every timing but tuning trials, of all generations.
-- `counts` is null where no evidence was kept, and false where the time is known not to count.
--
-- What is in one `family` has equal sizes and dtype. A step's model is known by its operations,
-- `flops`. `part` is what noise is known of: the shape of a step, an operator's name and pass.
-- `shown`: the figures of speed show it; the ablation's steps, forward and backward alone, `auto`
-- and the ceilings have figures of their own or none.
create or replace table timed as
with measured as (
    select
        device,
        run_of(run_id, device, recorded_at) as run,
        config_id,
        'step' as pass,
        origin,
        'step' as kind,
        shape as part,
        concat_ws(' ', dtype, batch, n_context, n_target, optimizer) as family,
        flops,
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
        false as twin,
        ln(step_ms_p50) as log_ms,
        step_ms_std / step_ms_p50 as deviation
    from steps
    union all
    select
        device,
        run_of(run_id, device, recorded_at) as run,
        config_id,
        pass,
        origin,
        'operator' as kind,
        concat_ws(' ', op_now(op, problem), pass) as part,
        concat_ws(
            ' ',
            op_now(op, problem),
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
            case when n_q is null then problem end
        ) as family,
        null as flops,
        implementation as name,
        '' as switches,
        null as ablation_part,
        implementation != 'auto' and not is_ceiling(op_now(op, problem)) as shown,
        coalesce(twin, false) as twin,
        ln(time_ms_p50) as log_ms,
        time_ms_std / time_ms_p50 as deviation
    from ops
    where forced is null
)

select
    measured.* exclude (origin),
    evidence.question,
    evidence.generation,
    evidence.is_current,
    evidence.role,
    evidence.counts,
    concat_ws(' ', evidence.torch, evidence.triton) as versions,
    evidence.sitting,
    evidence.started_at
from measured
inner join evidence using (device, run, config_id, pass)
where evidence.status = 'ok'
qualify
    row_number()
        over (
            partition by measured.device, measured.run, measured.config_id, measured.pass
            order by measured.origin
        )
    = 1;
