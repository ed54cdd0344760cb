-- How far is each operator of ours from what this device can do?
select device, op, pass, shape, implementation, time_ms, bound,
    share_of_roofline, share_low, share_high, counts
from roofline
where own and share_of_roofline is not null
order by device, share_of_roofline;
