-- Macro: what stands behind a timed row, in words.
create or replace macro evidence_cell(counts, why_not) as case
    when counts then 'complete'
    when counts is null then 'none: ' || coalesce(why_not, 'recorded before evidence was kept')
    else 'does not count: ' || why_not
end;
