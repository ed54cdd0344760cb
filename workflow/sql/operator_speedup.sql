-- Grain: device × comparison_key, of one pass of an operator: against its plain form (role
-- "baseline") and against the fastest implementation that is not ours, under the same versions of
-- torch and triton.
--
-- Ratios, 95 % intervals and verdicts come from table `contrasts`. There is no interval and no
-- verdict without evidence and for an implementation compared with itself. There is no ratio either
-- for two implementations that share no run. Times of the plain form and of the fastest are over
-- all their runs.
create or replace view operator_speedup as
with compared as (
    select * from contrasts
    where figure = 'operator_speedup'
)

select
    own.* exclude (
        code_version, flops, bytes, time_ms_low, time_ms_high, intensity, gb_per_s, ceiling_tflops,
        ceiling_gb_per_s, bound, roofline_tflops, share_low, share_high
    ),
    baseline.time_ms as baseline_time_ms,
    to_baseline.ratio as speedup,
    to_baseline.low as speedup_low,
    to_baseline.high as speedup_high,
    to_baseline.q,
    to_baseline.verdict,
    to_baseline.n_pairs,
    to_baseline.n_sessions,
    best.implementation as best_peer_implementation,
    best.time_ms as best_peer_time_ms,
    to_best.ratio as speedup_best,
    to_best.low as speedup_best_low,
    to_best.high as speedup_best_high,
    to_best.q as q_best,
    to_best.verdict as verdict_best
from roofline as own
left join compared as to_baseline
    on own.code_version = to_baseline.own and to_baseline.against_baseline
left join roofline as baseline on to_baseline.base = baseline.code_version
left join compared as to_best on own.code_version = to_best.own and to_best.against_best
left join roofline as best on to_best.base = best.code_version
where not is_ceiling(own.op);
