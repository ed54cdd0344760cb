-- Grain: device × run × implementation × uses × gate that a measurement waited for: the run of the
-- gate that decides about it.
--
-- `implementation` is as in table `code`, "" for a step. `uses` lists "family/implementation", and
-- for `auto` what it chose: its passes may differ, and each is judged by its own choice. A gate's
-- run matches where device model, torch and triton are equal and no definition has another hash.
-- Both must name definitions, or both whole modules. Definitions of `tnp.dispatch.tuned_tables`,
-- which was `tnp.choice`, are left out: they read tables, and the kernels that they chose are
-- compared elsewhere.
--
-- The newest match decides. It has passed where a check about the measurement's implementations, or
-- about all, is green and no such check is red or an error. Checks of `transformer_block` are about
-- every step that waits for its gate: no variant names it, because it runs the operators that the
-- variant names. `concerned` is false where no check is about the choice of `auto`. It is false for
-- gate `baseline` too, which every step waits for, where its checks are about another attention
-- than the step's, and another gate has checks about the step's. A run that was killed or took too
-- long decides nothing, unless a check was red by then. Early rows name gate `kernels` too, which
-- finds slow builds and no wrong results: this query drops it. Runs without kept evidence wait for
-- nothing and decide nothing.
create or replace table gate_evidence as
with measured as (
    select
        measurements.device,
        run,
        code_of as implementation,
        uses,
        any_value(gates) as gates,
        any_value(code_set) as code_set,
        any_value(torch) as torch,
        any_value(triton) as triton
    from (
        from stg_steps
        union all by name
        from stg_predictions
        union all by name
        from stg_generations
        union all by name
        from stg_ops
    ) as measurements
    inner join stg_code_sets as code_sets
        on measurements.run_id = code_sets.run_id and code_of = code_sets.implementation
    left join stg_environments using (environment_id)
    where gates != ''
    group by all
),

awaited as (
    select
        * exclude (gates),
        unnest(
            list_filter(string_split(gates, '|'), lambda named: named != 'kernels')
        ) as gate
    from measured
),

-- Rows of equal code need one answer.
asked as (
    select distinct * exclude (run) from awaited
),

gate_runs as (
    select
        device,
        run_id,
        gate,
        any_value(torch) as torch,
        any_value(triton) as triton,
        any_value(code_set) as code_set,
        max(recorded_at) as recorded_at
    from stg_gates
    inner join stg_code_sets as code_sets using (run_id)
    left join stg_environments using (environment_id)
    where code_sets.implementation = ''
    group by all
    having bool_and(status not in ('killed', 'timeout')) or bool_or(not passed)
),

sources as (
    select * from stg_code_parts
    where
        part in ('definition', 'module')
        and not regexp_matches(name, '^tnp[.](choice|dispatch[.]tuned_tables):')
),

-- Early rows name whole modules, later ones definitions.
of_modules as (
    select distinct code_set from stg_code_parts
    where part = 'module'
),

differing as (
    select distinct
        measured.code_set as measured_set,
        proving.code_set as proving_set
    from sources as measured
    inner join sources as proving using (part, name)
    where
        measured.hash != proving.hash
        and measured.code_set in (select code_set from asked)
        and proving.code_set in (select code_set from gate_runs)
),

deciding as (
    select
        asked.*,
        gate_runs.run_id as deciding_run,
        gate_runs.code_set as deciding_set
    from asked
    left join gate_runs
        on
            asked.device = gate_runs.device
            and asked.gate = gate_runs.gate
            and asked.torch is not distinct from gate_runs.torch
            and asked.triton is not distinct from gate_runs.triton
            and (asked.code_set in (select code_set from of_modules))
            = (gate_runs.code_set in (select code_set from of_modules))
            and (asked.code_set, gate_runs.code_set) not in (
                select (measured_set, proving_set) from differing
            )
    qualify
        row_number()
            over (
                partition by
                    asked.device,
                    asked.implementation,
                    asked.gate,
                    asked.uses,
                    asked.code_set,
                    asked.torch,
                    asked.triton
                order by gate_runs.recorded_at desc nulls last, gate_runs.run_id asc
            )
        = 1
),

-- Holds each gate run's answer about an implementation, or about all of them ("").
checks as (
    select
        run_id,
        gate,
        about,
        bool_or(status = 'ok' and passed) as has_passed,
        bool_or(
            status not in ('unsupported', 'killed', 'timeout') and not coalesce(passed, false)
        ) as is_red,
        any_value(
            case
                when status = 'error' then concat('did not finish: ', reason)
                when not passed
                    then
                        format('is red: {}: {} {:.3g}, bound {:.3g}', "check", metric, value, bound)
            end
        ) as why_red
    from stg_gates
    group by all
),

decided as (
    select
        deciding.*,
        bool_or(is_red) as is_red,
        bool_or(has_passed) as has_passed,
        any_value(why_red) as why_red,
        count(about) > 0 as has_checks,
        bool_or(starts_with(about, 'attention/')) as has_checked_attention,
        bool_or(len(list_filter(uses, lambda used: ends_with(used, '/auto'))) > 0) as is_auto
    from deciding
    left join checks
        on
            deciding.deciding_run = checks.run_id
            and deciding.gate = checks.gate
            and (
                checks.about = ''
                or list_contains(deciding.uses, checks.about)
                or starts_with(checks.about, 'transformer_block/')
            )
    group by all
),

judged as (
    select
        *,
        has_checks
        or not (
            is_auto
            or (
                gate = 'baseline'
                and coalesce(
                    bool_or(has_checked_attention)
                        over (partition by device, implementation, uses, code_set, torch, triton),
                    false
                )
            )
        ) as concerned
    from decided
)

select
    awaited.device,
    awaited.run,
    awaited.implementation,
    awaited.uses,
    awaited.gate,
    judged.deciding_run,
    judged.deciding_set,
    judged.deciding_run is null or judged.concerned as concerned,
    case
        when judged.is_red then false
        when judged.has_passed then true
    end as passed,
    case
        when judged.deciding_run is null
            then
                concat(
                    'gate ', gate, ' has not run on this code with these versions on this device'
                )
        when judged.is_red then concat('gate ', gate, ' ', judged.why_red)
        when not concerned then concat('gate ', gate, ' is not about what ran')
        when passed is null then concat('gate ', gate, ' could run no check of this')
    end as reason
from awaited
left join judged using (device, implementation, gate, uses, code_set, torch, triton);
