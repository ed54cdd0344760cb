-- Grain: device × run × config_id × pass: every measurement of a step, a prediction, a language
-- model or an operator, with the evidence behind it. All views of times filter this table.
--
-- The deciding run of a gate is its newest on the same code (`gate_evidence`). A row is `gated`
-- where each deciding run has passed, and together they launched each of its kernels in the same
-- form and name each definition that it ran (`needs_a_gate`). A row is not gated where a deciding
-- run is red. An operator's output must also have been checked after timing. This check alone gates
-- a peer or a baseline that waits for no gate. Null means that evidence is missing.
--
-- A row is `valid` where it is gated and precise enough, it ended well and nothing slowed the GPU.
-- `why_not` says in one sentence why a row is not. `is_used` marks the rows of a code version that
-- medians are over. They are its valid rows. If it has none, they are its rows without evidence,
-- and if it has none of these either, its invalid rows. `work_key` is equal where two things do the
-- same work and may be compared.
create or replace table measurements as
with gates_of_runs as (
    select
        device,
        run,
        implementation as code_of,
        uses,
        bool_or(not passed) as is_red,
        bool_and(passed is not null or not concerned) as has_passed,
        list_sort(list(distinct deciding_set)) as deciding_sets,
        coalesce(
            min(reason) filter (where not passed), min(reason) filter (where concerned)
        ) as gate_reason
    from gate_evidence
    group by all
),

coded as (
    select
        code_versions.*,
        coalesce(samples.precise_enough, settled) as precise_enough,
        code_set,
        is_red,
        has_passed,
        deciding_sets,
        gate_reason
    from code_versions
    left join stg_samples as samples
        on code_versions.run_id = samples.run_id and code_versions.pass = samples.pass
    left join stg_code_sets as code_sets
        on
            code_versions.run_id = code_sets.run_id
            and code_versions.code_of = code_sets.implementation
    left join gates_of_runs using (device, run, code_of, uses)
),

-- Lists each state of the code once: many rows share it.
decided as (
    select distinct
        code_set,
        deciding_sets
    from coded
    where code_set is not null and deciding_sets is not null
),

proving as (
    select
        deciding_sets,
        unnest(deciding_sets) as proving_set
    from (select distinct deciding_sets from decided) as combinations
),

ungated as (
    select
        code_set,
        deciding_sets,
        min(concat(part, ' ', name)) as ungated_part
    from decided
    inner join stg_code_parts using (code_set)
    where
        needs_a_gate(part, name)
        and (deciding_sets, part, name, hash) not in (
            select (proving.deciding_sets, parts.part, parts.name, parts.hash)
            from proving
            inner join stg_code_parts as parts on proving.proving_set = parts.code_set
        )
    group by all
),

judged as (
    select
        coded.*,
        ungated_part,
        case
            when run_id is null or code_set is null then null
            when is_red then false
            when checked and gates = '' and kind != 'step' and role != 'own' then true
            when checked and has_passed and ungated_part is null then true
        end as gated,
        status = 'ok' and not coalesce(throttled, false) and gated and precise_enough as valid,
        case
            when status != 'ok' then concat_ws(': ', status, nullif(reason, ''))
            when throttled then 'heat or hardware slowed the device while this was timed'
            when not gated then gate_reason
            when not precise_enough then 'the samples were not precise enough'
            when run_id is null then 'recorded before evidence was kept'
            when code_set is null then 'which code it ran on was not recorded'
            when not checked then 'the output was not checked after timing'
            when gated is null and not has_passed then gate_reason
            when gated is null then concat('no gate has run ', ungated_part, ' as it was timed')
            when precise_enough is null
                then 'whether the samples were precise enough was not recorded'
        end as why_not,
        evidence_rank(status, valid) as evidence_rank
    from coded
    left join ungated using (code_set, deciding_sets)
)

select
    judged.* exclude (
        checked,
        settled,
        code_set,
        is_red,
        has_passed,
        deciding_sets,
        gate_reason,
        ungated_part,
        evidence_rank,
        mean_ms,
        std_ms,
        sizes,
        without,
        other_timing,
        used_family
    ),
    coalesce(
        evidence_rank
        = max(evidence_rank) over (partition by device, code_version, coalesce(twin, false)),
        false
    ) as is_used,
    sessions.gpu,
    sessions.session,
    sessions.started_at,
    environments.torch,
    environments.triton,
    concat_ws(' ', environments.torch, environments.triton) as versions,
    case when status = 'ok' then ln(median_ms) end as log_ms,
    std_ms / median_ms as deviation,
    status = 'ok' and kind != 'prediction' and forced is null as is_timed,
    is_timed and coalesce(valid, true) as is_comparable,
    case
        when is_comparable then row_number() over (
            partition by code_version, pass, session, is_comparable
            order by started_at, run, config_id
        )
    end as ordinal
from judged
inner join sessions using (device, run)
left join stg_environments as environments using (environment_id);
