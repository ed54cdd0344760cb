-- topic: noise
-- # How much equal things differ
-- Two runs of the same code differ. One standard deviation is of the samples within a typical run,
-- the other of the runs' medians in one session. "A ratio" says how far two equal things that were
-- timed together differ. Verdicts take all of this into account.
select
    device,
    kind,
    part,
    n_runs as runs,
    format('{:.2f} %', 100 * within_runs) as within_a_run,
    format('{:.2f} %', 100 * between_runs) as between_runs,
    format('{:.2f} %', 100 * of_equals) as a_ratio,
    n_equals as pairs_of_equals
from noise
where n_equals > 0
order by device asc, kind desc, part asc;
