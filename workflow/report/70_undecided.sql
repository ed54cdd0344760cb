-- # Compared and not decided
-- What was compared with something else, with evidence, and is neither faster, slower nor the same,
-- and how many more runs we expect to decide it. Where a dash stands no number of runs would: the
-- ratio lies too near to 0.99 or 1.01, between which two things are the same. Comparisons of
-- something with its own earlier code, mostly within 1 %, are in view `undecided` too.
select
    device,
    replace(comparison_key, device || ' ', '') as compared,
    replace(base_comparison_key, device || ' ', '') as against,
    ratio_cell(ratio, low, high) as ratio,
    n_more_runs as more_runs
from undecided
where base_comparison_key <> comparison_key
order by all;
