-- Macro: the role of a row from before there was a column for it. `name` is the step's variant or
-- the operator's implementation, `used` the implementations that are in it. Later rows carry their
-- role, so these lists never grow.
create or replace macro earlier_role(name, used) as
case
    when list_has_any(used, ['separate', 'fused', 'single', 'auto']) then 'own'
    when name in ('sdpa_flash', 'torch') then 'baseline'
    else 'peer'
end;
