-- # What equal things differ by
-- Two runs of the same code differ. The standard deviation within a run is of a typical run's
-- samples, the one between runs of their medians in one session; "a ratio" is how far two equal
-- things that were timed together differ. Verdicts take all of it into account.
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
