-- Grain: question × run, of all generations and failed runs included.
--
-- `counts`: the row may be compared. `why_not` says why not. A time that is no finite number is an
-- error here.
create or replace table judged_steps as
select
    steps.* replace (
        evidence.status as status,
        evidence.reason as reason,
        evidence.role as role
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
from steps
inner join evidence
    on
        steps.device = evidence.device
        and run_of(steps.run_id, steps.device, steps.recorded_at) = evidence.run
        and steps.config_id = evidence.config_id
        and evidence.pass = 'step'
qualify
    row_number()
        over (partition by steps.device, evidence.run, steps.config_id order by steps.origin)
    = 1;
