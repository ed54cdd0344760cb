-- Macro: a ratio as a table shows it, "1.23 (1.21–1.25)"; without an interval where there is none.
create or replace macro ratio_cell(ratio, low, high) as
format('{:.2f}', ratio) || coalesce(format(' ({:.2f}–{:.2f})', low, high), '');
