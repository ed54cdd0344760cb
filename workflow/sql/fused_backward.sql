-- Grain: device × comparison_key, of whole training steps of variant `fused_attention`: how many
-- times as fast the step is as that of variant `separate`, under the same switches.
--
-- The two differ in attention's backward pass alone. Ratios, 95 % intervals and verdicts come from
-- table `contrasts`. Steps that share no session have no row.
create or replace view fused_backward as
select
    own.device,
    own.comparison_key,
    own.shape,
    own.batch,
    own.n_context,
    own.n_target,
    own.dtype,
    own.checkpoint,
    own.cuda_graph,
    own.time_ms as step_ms,
    base.time_ms as separate_ms,
    contrasts.ratio,
    contrasts.low,
    contrasts.high,
    contrasts.q,
    contrasts.verdict,
    contrasts.n_pairs,
    contrasts.n_sessions
from contrasts
inner join summaries as own on contrasts.own = own.code_version
inner join summaries as base on contrasts.base = base.code_version
where contrasts.figure = 'fused_backward';
