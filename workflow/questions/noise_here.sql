-- What is noise here? Standard deviations in percent, and by how much equal things differ.
select device, kind, part, n_runs,
    round(100 * within_runs, 2) as within_runs_percent,
    round(100 * between_runs, 2) as between_runs_percent,
    n_equals, round(100 * of_equals, 2) as of_equal_things_percent
from noise
order by device, kind, part;
