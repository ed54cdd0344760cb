-- Macro: how good the evidence of a timed row is: 2 it counts, 1 none was kept, 0 it does not
-- count. Null where nothing was timed. Medians are over the runs of a question that stand highest.
create or replace macro standing(status, counts) as case
    when status != 'ok' then null
    when counts then 2
    when counts is null then 1
    else 0
end;
