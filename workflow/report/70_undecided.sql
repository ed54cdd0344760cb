-- # Compared and not decided
-- What was compared with evidence and is neither faster, slower nor the same, and how many more
-- runs we expect to decide it. Without a number no count of runs would: the difference lies too
-- near to the 1 % that counts as the same.
select
    device,
    replace(question, device || ' ', '') as question,
    case
        when base_question = question then 'the same, earlier code'
        else replace(base_question, device || ' ', '')
    end as against,
    ratio_cell(ratio, low, high) as ratio,
    n_more_runs as more_runs
from undecided
order by all;
