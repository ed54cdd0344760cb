-- Grain: question × run × contender, of all generations and failed runs included, but no tuning
-- trials. A question is of one pass, and a twin is a second contender of its implementation.
--
-- `counts`: the row may be compared. `why_not` says why not. A time that is no finite number is an
-- error here.
create or replace table judged_ops as
select
    ops.* replace (
        evidence.status as status,
        evidence.reason as reason,
        evidence.role as role,
        op_now(ops.op, ops.problem) as op
    ),
    evidence.run,
    evidence.gpu,
    evidence.sitting,
    evidence.question,
    evidence.generation,
    evidence.is_current,
    evidence.started_at,
    evidence.torch,
    evidence.triton,
    evidence.proven,
    evidence.counts,
    evidence.why_not
from ops
inner join evidence
    on
        ops.device = evidence.device
        and run_of(ops.run_id, ops.device, ops.recorded_at) = evidence.run
        and ops.config_id = evidence.config_id
        and ops.pass = evidence.pass
where ops.forced is null
qualify
    row_number()
        over (partition by ops.device, evidence.run, ops.config_id, ops.pass order by ops.origin)
    = 1;
