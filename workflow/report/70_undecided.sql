-- topic: undecided
-- # Compared and not decided
-- These comparisons have evidence, and are neither faster, slower nor the same. The table says
-- how many further runs would probably decide each comparison. A dash means that 100 further runs
-- in one session would not, because the ratio is too near to 0.99 or 1.01. View `undecided` also
-- has comparisons with earlier code, which are mostly within 1 %.
select
    device,
    replace(comparison_key, device || ' ', '') as compared,
    replace(base_comparison_key, device || ' ', '') as against,
    ratio_cell(ratio, low, high) as ratio,
    n_more_runs as more_runs
from undecided
where figure <> 'regressions'
order by all;
