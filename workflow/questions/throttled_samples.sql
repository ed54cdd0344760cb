-- Which samples had their clock lowered, how far, and why? `throttled` is by heat or hardware.
select s.device, s.config_id, s.run_id, s.pass, coalesce(o.throttled, t.throttled) as throttled,
    coalesce(o.throttle_reasons, t.throttle_reasons) as reasons, min(s.sm_clock_mhz) as lowest_mhz,
    max(s.top_mhz) as top_mhz, max(coalesce(o.n_samples, t.n_samples)) as n_samples,
    count(*) as n_lowered, min(s.sample) as first_sample, max(s.sample) as last_sample
from (select *, max(sm_clock_mhz) over (partition by device) as top_mhz from samples) as s
left join ops as o using (run_id, config_id, pass)
left join steps as t on s.run_id = t.run_id and s.config_id = t.config_id
where reasons != '' and s.sm_clock_mhz < s.top_mhz
group by all
order by throttled desc, n_lowered desc;
