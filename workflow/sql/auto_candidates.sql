-- Grain: op × implementation: what `auto` chooses from everywhere, PyTorch's plain form first.
create or replace view auto_candidates as
select
    op,
    implementation,
    rank
from implementations
where chosen_from;
