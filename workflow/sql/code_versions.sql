-- Grain: device × run × config_id × pass: every measurement of a step, a prediction, a language
-- model or an operator, failed ones included, with its comparison key and its code version.
--
-- Rows share a comparison key where device, variant or implementation, sizes, dtype and switches
-- are equal. An operator's latency has another key than its throughput. Rows share a code version
-- where they also agree in the hashes of the specification, the launched kernels and the timing
-- policy, and in the chosen kernels and configurations, from whatever source. For predictions,
-- language models and steps without a CUDA graph the source files take part too, because their host
-- code takes time.
-- They take part for an operator of ours as well, because its host code decides how operands are
-- padded. A failed row without a known launch joins the newest version with which it agrees
-- otherwise.
--
-- A key's current version is the version of its newest row with an outcome. A row that could not
-- run here, was killed or took too long replaces nothing.
create or replace table code_versions as
with measured as (
    select
        *,
        kernels_hash
        || coalesce(regexp_replace(launch_config, '"source": "[^"]*",? ?', '', 'g'), '')
            as launched,
        status = 'ok' and not coalesce(isfinite(median_ms) and isfinite(mean_ms), false)
            as is_infinite
    from (
        from stg_steps
        union all by name
        from stg_predictions
        union all by name
        from stg_generations
        union all by name
        from stg_ops
    ) as of_all_kinds
),

known as (
    select
        * exclude (is_infinite) replace (
            case when is_infinite then 'error' else status end as status,
            case when is_infinite then 'its time is not a finite number' else reason end as reason
        ),
        coalesce(
            launched,
            case
                when (is_infinite or status != 'ok') and spec_hash is not null
                    then arg_max(launched, recorded_at) over (
                        partition by comparison_key, spec_hash, timing_hash, source_hash
                    )
            end
        ) as known_launch
    from measured
),

versions as (
    select
        * exclude (launched, known_launch, host_hash),
        md5(
            concat_ws(
                '|',
                comparison_key,
                coalesce(spec_hash, '-'),
                coalesce(known_launch, '-'),
                coalesce(timing_hash, '-'),
                host_hash
            )
        ) as code_version
    from known
)

select
    *,
    code_version = coalesce(
        arg_max(code_version, row(recorded_at, code_version))
        filter (where status in ('ok', 'oom', 'error', 'gate_failed')) over of_key,
        arg_max(code_version, row(recorded_at, code_version)) over of_key
    ) as is_current
from versions
window of_key as (partition by comparison_key);
