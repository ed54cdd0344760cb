-- Grain: device × gate × op × implementation × problem × kernel × check × metric, from each gate's
-- newest run on the device. Checks that the gate no longer makes are not in it.
create or replace view current_gates as
with newest as (
    select
        device,
        gate,
        arg_max(run, row(recorded_at, run)) as run
    from stg_gates
    group by device, gate
)

select stg_gates.* exclude (about)
from stg_gates
semi join newest using (device, gate, run)
qualify
    row_number()
        over (
            partition by device, run, gate, op, implementation, problem, kernel, "check", metric
            order by origin, recorded_at, value
        )
    = 1;
