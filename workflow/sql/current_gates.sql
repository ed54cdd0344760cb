-- Grain: device × gate × op × implementation × problem × kernel × check × metric, of each gate's
-- newest run on the device: a check that the gate no longer makes is not in it.
create or replace view current_gates as
with gates_of_runs as (
    select
        *,
        run_of(run_id, device, recorded_at) as run
    from gates
)

select * from gates_of_runs
qualify
    run = arg_max(run, row(recorded_at, run)) over (partition by device, gate)
    and row_number()
        over (
            partition by
                device, run, gate, op, implementation, problem, kernel, "check", metric
            order by origin
        )
    = 1;
