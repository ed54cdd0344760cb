-- Grain: device × run × config_id × pass, as in `measurements`: whether the row is proven and may
-- be compared with others (`counts`), and one sentence that says why where it may not; the sitting,
-- the GPU and the versions of torch and triton that it was measured with.
--
-- A row is proven where every gate that it waited for has passed, one of the deciding runs launched
-- each of its kernels in the same form, and one of them names each definition of the model, the
-- step and the operators that it ran. It is disproven where a deciding run is red. An operator's
-- output must also have been checked after it was timed; PyTorch's own forms, which wait for no
-- gate, are proven by that check alone. Null is neither: the evidence is not there, or was not kept
-- yet.
create or replace table evidence as
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
        ) as reason
    from gate_evidence
    group by all
),

coded as (
    select
        measurements.*,
        code_set,
        is_red,
        has_passed,
        deciding_sets,
        gates_of_runs.reason as gate_reason
    from measurements
    left join code_sets
        on
            measurements.run_id = code_sets.run_id
            and measurements.code_of = code_sets.implementation
    left join gates_of_runs using (device, run, code_of, uses)
),

-- Of each state of the code: what was measured and no deciding run of a gate ran.
proven_by as (
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
    from (select distinct deciding_sets from proven_by) as combinations
),

unproven as (
    select
        code_set,
        deciding_sets,
        min(concat(part, ' ', name)) as unproven_part
    from proven_by
    inner join code_parts using (code_set)
    where
        (
            part = 'kernel'
            or (
                part in ('definition', 'module')
                and regexp_matches(
                    name,
                    '^tnp\.(ops|buffer|captures|decode_graphs|drawing|joint|layers|model|packing'
                    || '|prediction|step|step_graphs)(\.|:|$)'
                )
                -- They choose and say what ran: what was chosen is proven in their place. PyTorch's
                -- forms, which `auto` may choose too, no gate proves where they run alone either.
                and not regexp_matches(
                    name,
                    '^tnp\.ops\.((auto|registry)(:|$)|\w+\.torch_forms:)|:describe_launch$'
                )
            )
        )
        and (deciding_sets, part, name, hash) not in (
            select (proving.deciding_sets, proven.part, proven.name, proven.hash)
            from proving
            inner join code_parts as proven on proving.proving_set = proven.code_set
        )
    group by all
),

judged as (
    select
        coded.* replace (coalesce(settling.settled, coded.settled) as settled),
        unproven_part,
        case
            when run_id is null or code_set is null then null
            when is_red then false
            when checked and gates = '' and pass != 'step' and role != 'own' then true
            when checked and has_passed and unproven_part is null then true
        end as proven
    from coded
    left join unproven using (code_set, deciding_sets)
    left join settling using (run_id, pass)
)

select
    judged.* exclude (
        code_of,
        checked,
        code_set,
        is_red,
        has_passed,
        deciding_sets,
        gate_reason,
        unproven_part
    ),
    status = 'ok' and not coalesce(throttled, false) and proven and settled as counts,
    case
        when status != 'ok' then concat_ws(': ', status, nullif(reason, ''))
        when throttled then 'the device was too hot while this was timed'
        when not proven then gate_reason
        when not settled then 'the samples had not settled'
        when run_id is null then 'recorded before evidence was kept'
        when code_set is null then 'which code it ran on was not recorded'
        when not checked then 'the output was not checked after timing'
        when proven is null and not has_passed then gate_reason
        when proven is null then concat('no gate has run ', unproven_part, ' as it was timed')
        when settled is null then 'whether the samples had settled was not recorded'
    end as why_not,
    sittings.gpu,
    sittings.sitting,
    sittings.started_at,
    machines.torch,
    machines.triton
from judged
inner join sittings using (device, run)
left join machines using (environment_id);
