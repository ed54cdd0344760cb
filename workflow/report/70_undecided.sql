-- topic: undecided
-- # Compared and not decided
-- These comparisons have evidence, and are neither faster, slower nor the same. The table says how
-- many more runs we expect to decide each. A dash means that no number of runs would, because the
-- ratio is too near to 0.99 or 1.01. Comparisons with earlier code, mostly within 1 %, are in view
-- `undecided` too.
select
    device,
    replace(comparison_key, device || ' ', '') as compared,
    replace(base_comparison_key, device || ' ', '') as against,
    ratio_cell(ratio, low, high) as ratio,
    n_more_runs as more_runs
from undecided
where base_comparison_key <> comparison_key
order by all;
