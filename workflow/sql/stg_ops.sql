-- Grain: device × run × config_id × pass: a recorded timing of an operator under its present name,
-- with its role and its comparison key. Early rows have no role, no mean time and no problem.
--
-- `draw` is null where sizes alone say how values were drawn. Early rows say in `d_ff` how many
-- hidden units are real, later ones in `draw` too: both are one problem.
create or replace view stg_ops as
with families as (
    select distinct
        op,
        family
    from implementations
),

named as (
    select
        * exclude (family) replace (
            op_now(op, problem) as op,
            coalesce(role, earlier_role(implementation, [implementation])) as role
        ),
        coalesce(family, ops.op) as used_family,
        run_of(run_id, device, recorded_at) as run
    from ops
    left join families using (op)
    qualify
        row_number() over (partition by device, run, config_id, pass order by recorded_at, origin)
        = 1
)

select
    *,
    'operator' as kind,
    implementation as code_of,
    nullif(timing, 'throughput') as other_timing,
    concat_ws(' ', op, pass, other_timing) as part,
    implementation as name,
    '' as switches,
    concat_ws(
        ' ',
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
        nullif(
            case
                when d_ff is null then draw
                else json_merge_patch(coalesce(draw, '{}'), '{"d_ff_real": null}')
            end,
            '{}'
        )
    ) as sizes,
    concat_ws(' ', op, pass, sizes, other_timing) as work_key,
    concat_ws(' ', device, op, pass, implementation, sizes, forced, other_timing)
        as comparison_key,
    time_ms_p50 as median_ms,
    coalesce(time_ms_mean, time_ms_p50) as mean_ms,
    time_ms_std as std_ms,
    case when role = 'own' then coalesce(source_hash, '-') end as host_hash,
    list_distinct(
        [
            used_family || '/' || implementation,
            used_family || '/' || case
                when implementation = 'auto' then launch_config ->> 'implementation'
            end
        ]
    ) as uses,
    coalesce(isfinite(max_abs_error), false) as checked
from named;
