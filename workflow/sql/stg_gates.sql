-- Grain: a recorded check of a gate, with its run and what it is about: "family/implementation", or
-- "" for all implementations. Early checks name no operator and are about attention. `phase` of an
-- implementation's gate is the one that the catalog says today, whatever was recorded. Nine gates
-- have none: gates of implementations replaced them on 2026-11-23.
create or replace view stg_gates as
with families as (
    select distinct
        op,
        family
    from implementations
)

select
    gates.* replace (
        case
            when starts_with(gate, 'op--') then implementations.phase
            when
                gate in (
                    'attention_forward', 'attention_backward', 'attention_fused', 'mlp',
                    'embedding', 'projection', 'rms_norm', 'mixture_heads', 'mixture_nll'
                )
                then null
            else gates.phase
        end as phase
    ),
    run_of(run_id, device, recorded_at) as run,
    case
        when gates.implementation = '' then ''
        else coalesce(families.family, op, 'attention') || '/' || gates.implementation
    end as about
from gates
left join families using (op)
left join implementations using (op, implementation);
