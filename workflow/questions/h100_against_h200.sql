-- How does an H100 compare with an H200? One step's time on both, each with evidence, of
-- one model (`spec_hash` is of model, sizes and variant), under the same torch and triton.
select h100.shape, h100.variant, h100.cuda_graph, torch, triton,
    round(median(h100.step_ms_p50), 2) as h100_ms, round(median(h200.step_ms_p50), 2) as h200_ms,
    round(median(h100.step_ms_p50) / median(h200.step_ms_p50), 2) as h200_is_times_as_fast
from current_steps as h100
inner join current_steps as h200 using (spec_hash, torch, triton)
where h100.device like '%h100%' and h200.device like '%h200%' and h100.valid and h200.valid
group by all
order by h100.shape, h100_ms;
