-- Which timings had their clock lowered, why, and how far? `throttled` is by heat or hardware.
select device, config_id, 'step' as pass, throttle_reasons, throttled, sm_clock_mhz_min
from current_steps
where throttle_reasons != ''
union all
select device, config_id, pass, throttle_reasons, throttled, sm_clock_mhz_min
from current_ops
where throttle_reasons != ''
order by all;
