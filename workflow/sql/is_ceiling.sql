-- Macro: whether an operator, by its name today, is a ceiling: what the device itself reaches.
create or replace macro is_ceiling(op) as starts_with(op, 'ceiling_');
