-- Grain: a recorded check of a gate, with its run and what it is about: "family/implementation", or
-- "" for all implementations. Early checks name no operator and are about attention.
create or replace view stg_gates as
with families as (
    select distinct
        op,
        family
    from implementations
)

select
    gates.*,
    run_of(run_id, device, recorded_at) as run,
    case
        when implementation = '' then ''
        else coalesce(family, op, 'attention') || '/' || implementation
    end as about
from gates
left join families using (op);
