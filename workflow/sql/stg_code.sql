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

-- Grain: run_id × implementation: a hash of the definitions that ran while it was timed. Code that
-- prepares a timing or records it is left out: `tnp.bench`, `tnp.experiment`, `tnp.gates`, and
-- `tnp.tasks.sizes`, which draws sizes.
create or replace table stg_host_code as
with hashed as (
    select
        code_set,
        md5(string_agg(name || ' ' || hash, '|' order by name)) as host_code
    from stg_code_parts
    where
        part = 'definition'
        and not regexp_matches(name, '^tnp\.(bench|experiment|gates|tasks\.sizes)\b')
    group by code_set
)

select
    run_id,
    implementation,
    host_code
from stg_code_sets
inner join hashed using (code_set);
