-- topic: evidence
-- # Gates
-- A gate is a set of checks that a kernel must pass before its times are valid. The table shows the
-- worst check as a share of its bound, and values up to 1 pass. "Phase" is the phase of the
-- specification that asks for it. `batch_noise` measures how far 8 bits change a step's gradients.
-- Nothing waits for it.
select
    device,
    gate,
    phase,
    n_checks as checks,
    n_failed as failed,
    passed as green,
    worst_value_over_bound as worst_check
from gate_status
order by device, gate;
