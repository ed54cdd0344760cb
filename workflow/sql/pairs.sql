-- Grain: own × base × run: two things that were timed under the same conditions. `difference` is
-- the natural logarithm of how many times as fast `own` was.
--
-- Two operators pair within one run, where they took turns. Two steps pair within one session: the
-- k-th run of one step with the k-th run of the other step. Versions of torch and triton are the
-- same, and so is a step's model, known by its operations. `own` and `base` are code versions.
-- `base` is PyTorch's or another package's, or a step of ours. That step lacks one component, or
-- has attention's backward pass in two passes where `own` fuses it. `equal` pairs are of one code
-- version: two copies in a run, or two runs of a session. The `successive` ones tell how far equal
-- things differ. `valid` is null where one of the two has no evidence.
create or replace table pairs as
with timings as (
    select
        *,
        case kind when 'step' then flops end as model_flops,
        coalesce(twin, false) as is_twin,
        case kind when 'step' then run else config_id end as copy
    from measurements
    where is_comparable
)

select
    own.device,
    own.kind,
    own.part,
    own.work_key,
    own.code_version as own,
    base.code_version as base,
    own.session,
    base.log_ms - own.log_ms as difference,
    own.valid and base.valid as valid,
    false as equal,
    false as successive
from timings as own
inner join timings as base
    on
        own.device = base.device
        and own.work_key = base.work_key
        and own.model_flops is not distinct from base.model_flops
        and own.versions = base.versions
        and own.session = base.session
        and case when own.kind = 'step' then own.ordinal = base.ordinal else own.run = base.run end
where
    own.code_version != base.code_version
    and not own.is_twin
    and not base.is_twin
    and (
        base.role != 'own'
        or (
            base.kind = 'step'
            and (starts_with(base.name, 'without_') or fuses_backward(own.name, base.name))
        )
    )

union all

select
    later.device,
    later.kind,
    later.part,
    later.work_key,
    concat_ws(' ', later.code_version, later.copy) as own,
    concat_ws(' ', earlier.code_version, earlier.copy) as base,
    later.session,
    earlier.log_ms - later.log_ms as difference,
    earlier.valid and later.valid as valid,
    true as equal,
    later.kind = 'operator' or later.ordinal = earlier.ordinal + 1 as successive
from timings as earlier
inner join timings as later
    on
        earlier.device = later.device
        and earlier.code_version = later.code_version
        and earlier.session = later.session
        and case
            when earlier.kind = 'step' then earlier.ordinal < later.ordinal
            else earlier.run = later.run and earlier.config_id < later.config_id
        end;
