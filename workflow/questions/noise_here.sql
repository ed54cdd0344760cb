-- What is noise here? Standard deviations in percent, and by how much equal things differ.
select device, kind, part, n_runs,
    100 * within_runs as within_runs_percent,
    100 * between_runs as between_runs_percent,
    100 * of_equals as of_equal_things_percent
from noise
order by device, kind, part;
