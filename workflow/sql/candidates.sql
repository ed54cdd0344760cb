-- Grain: own × base: two contenders that a figure may compare: of one device, the same work and the
-- same versions of torch and triton.
--
-- `for_speedup`: figures of speed compare them. `base` is then not ours, and both are current. A
-- contender that computes in a narrower format than the problem's dtype is a base only for
-- contenders that do so too. `ablated` names the step with or without one component that the
-- ablation compares with the whole variant or with PyTorch's step, and is null for other pairs.
-- `for_fused_backward`: view `fused_backward` compares the two.
create or replace view candidates as
select
    own.device,
    own.kind,
    own.code_version as own,
    base.code_version as base,
    base.role = 'baseline' and base.switches = '' and base.is_comparable as against_baseline,
    own.is_current and base.is_current as are_current,
    are_current
    and own.in_speed_figures
    and base.in_speed_figures
    and base.role != 'own'
    and base.precision in ('', own.precision)
        as for_speedup,
    case
        when own.switches != base.switches
            then null
        when own.ablation_part = 'only' and base.ablation_part = 'whole'
            then case when own.is_current and base.role != 'own' then own.code_version end
        when own.ablation_part = 'whole' and base.ablation_part = 'without'
            then case when base.is_current and own.role = 'own' then base.code_version end
    end as ablated,
    are_current
    and own.in_speed_figures
    and base.in_speed_figures
    and own.kind = 'step'
    and own.switches = base.switches
    and fuses_backward(own.name, base.name)
        as for_fused_backward,
    own.has_evidence as own_has_evidence,
    own.has_evidence and base.has_evidence as both_have_evidence,
    base.is_comparable as base_is_comparable,
    base.log_ms as base_log_ms,
    base.log_ms - own.log_ms as log_ratio_of_medians,
    (own.flops is not distinct from base.flops) as is_same_model
from contenders as own
inner join contenders as base
    on
        own.device = base.device
        and own.work_key = base.work_key
        and own.versions = base.versions
where own.is_comparable and (for_speedup or ablated is not null or for_fused_backward);
