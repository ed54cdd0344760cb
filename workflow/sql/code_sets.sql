-- Grain: run_id × implementation: the name of all the code that it ran (`code_set`), which table
-- `code_parts` lists. Runs of equal code share the name.
create or replace view code_sets as
select
    run_id,
    implementation,
    code_set
from code;
