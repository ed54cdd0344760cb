-- Grain: device × run × config_id × pass: every measurement of a step (pass "step"), of predictions
-- (pass "prediction") or an operator that the store holds, failed ones included, with the question
-- it answers and its generation. An operator's latency is another question than its throughput.
--
-- Rows answer one question where device, variant or implementation, sizes, dtype and switches are
-- equal. They are of one generation where they also agree in the hashes of what was asked for, what
-- was launched and how it was timed, and in the kernels and configurations that were chosen,
-- wherever the choice came from. For predictions and a step without a CUDA graph the source files
-- count too, because their host code takes part in the time. So do they for an operator of ours,
-- because its host code decides what its kernels work on: how operands are padded, for example. A
-- failed row of which no launch is known joins the newest generation that it agrees with in all the
-- rest. The current generation is that of the newest row with an outcome: what could not run here,
-- was killed or took too long takes nobody's place. `uses` lists "family/implementation" (view
-- `families`), of `auto` also what it chose.
create or replace table measurements as
with steps_as_measured as (
    select
        *,
        'step' as pass,
        '' as code_of,
        concat_ws(
            ' ',
            device,
            variant,
            dtype,
            'batch=' || batch,
            'n_context=' || n_context,
            'n_target=' || n_target,
            case when checkpoint then 'checkpoint' end,
            case when cuda_graph then 'cuda_graph' end,
            case when not optimizer then 'without_optimizer' end
        ) as question,
        step_ms_p50 as median_ms,
        coalesce(step_ms_mean, step_ms_p50) as mean_ms,
        case when not coalesce(cuda_graph, false) then coalesce(source_hash, '-') end
            as host_hash,
        list_distinct(
            list_concat(
                list_transform(
                    json_keys(operators),
                    lambda name: name || '/' || (operators ->> name)
                ),
                list_transform(
                    json_transform(
                        choices, '[{"op": "VARCHAR", "implementation": "VARCHAR"}]'
                    ),
                    lambda choice: choice['op'] || '/' || choice['implementation']
                )
            )
        ) as uses,
        earlier_role(
            variant, coalesce(operators ->> '$.*', [split_part(variant, '_', 1)])
        ) as role_by_name,
        true as checked
    from steps
),

predictions_as_measured as (
    select
        *,
        'prediction' as pass,
        '' as code_of,
        concat_ws(
            ' ',
            device,
            'predictions',
            form,
            variant,
            dtype,
            'batch=' || batch,
            'n_context=' || n_context,
            'n_target=' || n_target
        ) as question,
        time_ms_p50 as median_ms,
        time_ms_mean as mean_ms,
        coalesce(source_hash, '-') as host_hash,
        list_transform(
            json_keys(operators),
            lambda name: name || '/' || (operators ->> name)
        ) as uses,
        role as role_by_name,
        null::varchar as launch_config,
        true as checked
    from predictions
),

operators_as_measured as (
    select
        *,
        implementation as code_of,
        concat_ws(
            ' ',
            device,
            op_now(op, problem),
            pass,
            implementation,
            dtype,
            'batch=' || batch,
            'n_q=' || n_q,
            'n_k=' || n_k,
            'n_heads=' || n_heads,
            'head_dim=' || head_dim,
            'd_model=' || d_model,
            'd_ff=' || d_ff,
            'd_ff_storage=' || d_ff_storage,
            'n_components=' || n_components,
            case when n_q is null then in_words(problem) end,
            drawn(draw, d_ff),
            forced,
            nullif(timing, 'throughput')
        ) as question,
        time_ms_p50 as median_ms,
        coalesce(time_ms_mean, time_ms_p50) as mean_ms,
        earlier_role(implementation, [implementation]) as role_by_name,
        case when coalesce(role, role_by_name) = 'own' then coalesce(source_hash, '-') end
            as host_hash,
        list_distinct(
            [
                coalesce(family, op) || '/' || implementation,
                coalesce(family, op) || '/' || case
                    when implementation = 'auto' then launch_config ->> 'implementation'
                end
            ]
        ) as uses,
        coalesce(isfinite(max_abs_error), false) as checked
    from ops
    left join families using (op)
),

measured as (
    select
        *,
        run_of(run_id, device, recorded_at) as run,
        case
            when status = 'ok' and not coalesce(isfinite(median_ms) and isfinite(mean_ms), false)
                then 'error'
            else status
        end as outcome,
        coalesce(
            launched,
            case
                when outcome != 'ok' and spec_hash is not null
                    then arg_max(launched, recorded_at) over (
                        partition by question, spec_hash, timing_hash, source_hash
                    )
            end
        ) as known_launch
    from (
        select
            *,
            kernels_hash || coalesce(
                regexp_replace(launch_config, '"source": "[^"]*",? ?', '', 'g'), ''
            ) as launched
        from (
            from steps_as_measured
            union all by name
            from predictions_as_measured
            union all by name
            from operators_as_measured
        ) as of_all_kinds
    ) as as_launched
    qualify row_number() over (partition by device, run, config_id, pass order by recorded_at) = 1
),

generations as (
    select
        *,
        md5(
            concat_ws(
                '|',
                question,
                coalesce(spec_hash, '-'),
                coalesce(known_launch, '-'),
                coalesce(timing_hash, '-'),
                host_hash
            )
        ) as generation
    from measured
)

select
    device,
    run,
    run_id,
    environment_id,
    recorded_at,
    config_id,
    pass,
    code_of,
    question,
    generation,
    generation = coalesce(
        arg_max(generation, row(recorded_at, generation))
        filter (where outcome in ('ok', 'oom', 'error', 'gate_failed')) over of_question,
        arg_max(generation, row(recorded_at, generation)) over of_question
    ) as is_current,
    coalesce(role, role_by_name) as role,
    gates,
    uses,
    outcome as status,
    case when outcome = status then reason else 'its time is not a finite number' end as reason,
    checked,
    settled,
    throttled
from generations
window of_question as (partition by question);
