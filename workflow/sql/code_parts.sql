-- Grain: code_set × part × name × hash: what is in each set of code.
create or replace table code_parts as
select distinct
    code_set,
    part,
    name,
    hash
from code
inner join code_sets using (run_id, implementation);
