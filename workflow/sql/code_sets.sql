-- Grain: run_id × implementation: a name for all the code that it ran on (`code_set`). Runs of
-- equal code share it, so that code is compared once and not run by run.
create or replace table code_sets as
select
    run_id,
    implementation,
    md5(list_sort(list(distinct concat_ws(' ', part, name, hash)))::text) as code_set
from code
group by all;
