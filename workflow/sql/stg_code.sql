-- Grain: run_id × implementation: a name for all the code that it ran (`code_set`). Runs of equal
-- code share the name, so code is compared once and not for every run.
create or replace table stg_code_sets as
select
    run_id,
    implementation,
    code_set_of(part, name, hash) as code_set
from code
group by all;

-- Grain: code_set × part × name × hash: the kernels, packages and definitions of each set of code.
create or replace table stg_code_parts as
with sets as (
    select
        code_set_of(part, name, hash) as code_set,
        list(distinct struct_pack(part := part, name := name, hash := hash)) as parts
    from code
    group by run_id, implementation
)

select
    code_set,
    unnest(any_value(parts), recursive := true) -- noqa: AL03
from sets
group by code_set;
