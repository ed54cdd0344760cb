-- Grain: device × config_id × replicate × pass, of the run that counts.
--
-- A run times all implementations of an operator in turn and has one `recorded_at`; only within it
-- are they compared. Of several runs of one replicate, this machine's before recorded ones, that
-- one counts which had most of them to run, failed or not, and of equals the last: a run without
-- the peers' packages does not take the place of one with them. `auto` is one of the others and
-- adds nothing.
create or replace view current_ops as
with runs as (
    select
        *,
        count(*) filter (where status != 'unsupported' and implementation != 'auto') over (
            partition by device, op, shape, dtype, replicate, origin, recorded_at
        ) as n_ran
    from ops
)

select * exclude (n_ran) from runs
qualify
    rank()
        over (
            partition by device, op, shape, dtype, replicate
            order by origin desc, n_ran desc, recorded_at desc
        )
    = 1;
