-- Grain: run_id × implementation: the name of all the code that it ran (`code_set`). Runs of equal
-- code share the name.
create or replace view stg_code_sets as
select
    run_id,
    implementation,
    code_set
from code;

-- Grain: code_set × part × name × hash: the kernels, packages and definitions of each set of code.
create or replace view stg_code_parts as
select
    code_set,
    part,
    name,
    hash
from code_parts;
