-- Grain: op: the operators whose implementations a variant names together, as it calls them.
create or replace view families as
select distinct
    op,
    family
from implementations;
