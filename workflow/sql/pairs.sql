-- Grain: own × base × run: two things that were timed under the same conditions, and `difference`,
-- the natural logarithm of how many times as fast `own` was.
--
-- Two operators are a pair within one run, where they took turns. Two steps are a pair within one
-- sitting: the k-th run of the one with the k-th of the other. Versions of torch and triton are the
-- same, and so is a step's model, known by its operations. `own` and `base` are generations; `base`
-- is PyTorch's or another package's, or has a component of ours less. `equal` pairs are of one
-- generation, two copies in a run or two runs of a sitting; `successive` ones say how far equal
-- things differ. `counts` is null where one of the two has no evidence.
create or replace table pairs as
select
    own.device,
    own.kind,
    own.part,
    own.family,
    own.generation as own,
    base.generation as base,
    own.sitting,
    base.log_ms - own.log_ms as difference,
    own.counts and base.counts as counts,
    false as equal,
    false as successive
from timings as own
inner join timings as base
    on
        own.device = base.device
        and own.family = base.family
        and own.flops is not distinct from base.flops
        and own.versions = base.versions
        and own.sitting = base.sitting
        and case when own.kind = 'step' then own.ordinal = base.ordinal else own.run = base.run end
where
    own.generation != base.generation
    and not own.twin
    and not base.twin
    and (base.role != 'own' or base.ablation_part = 'without')

union all

select
    later.device,
    later.kind,
    later.part,
    later.family,
    concat_ws(
        ' ', later.generation, case later.kind when 'step' then later.run else later.config_id end
    ) as own,
    concat_ws(
        ' ',
        earlier.generation,
        case later.kind when 'step' then earlier.run else earlier.config_id end
    )
        as base,
    later.sitting,
    earlier.log_ms - later.log_ms as difference,
    earlier.counts and later.counts as counts,
    true as equal,
    later.kind = 'operator' or later.ordinal = earlier.ordinal + 1 as successive
from timings as earlier
inner join timings as later
    on
        earlier.device = later.device
        and earlier.generation = later.generation
        and earlier.sitting = later.sitting
        and case
            when earlier.kind = 'step' then earlier.ordinal < later.ordinal
            else earlier.run = later.run and earlier.config_id < later.config_id
        end;
