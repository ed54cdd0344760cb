-- Grain: device × run × config_id × pass: the timings of every generation that may be compared, as
-- the statistics read them. `ordinal` numbers the runs of a generation in a sitting.
create or replace table timings as
select
    *,
    row_number() over (
        partition by generation, pass, sitting
        order by started_at, run, config_id
    ) as ordinal
from timed
where counts is distinct from false;
