-- Grain: device × gate × op × implementation × problem × kernel × check × metric, from each gate's
-- newest run on the device. Checks that the gate no longer makes are not in it.
create or replace view current_gates as
select * exclude (about) from stg_gates
qualify
    run = arg_max(run, row(recorded_at, run)) over (partition by device, gate)
    and row_number()
        over (
            partition by
                device, run, gate, op, implementation, problem, kernel, "check", metric
            order by origin, recorded_at, value
        )
    = 1;
