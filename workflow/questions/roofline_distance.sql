-- How far is each operator of ours from what this device can do? Those with evidence first.
select device, op, pass, shape, implementation, round(1000 * time_ms, 1) as time_us, bound,
    round(100 * share_of_roofline, 1) as percent_of_roofline,
    round(100 * share_low, 1) as low, round(100 * share_high, 1) as high, valid
from roofline
where own and share_of_roofline is not null
order by device asc, valid desc nulls last, share_of_roofline asc;
