-- Grain: device × op × pass × implementation × shape: against PyTorch's plain form (of attention
-- sdpa_flash) and the fastest peer.
--
-- Only what was timed in the same runs is compared: the rows of a run have one `recorded_at`, and
-- in it the implementations took turns.
create or replace view operator_speedup as
with runs as (
    select
        device,
        config_id,
        pass,
        list(recorded_at order by recorded_at) as recorded_at
    from current_ops
    group by all
),

operators as (
    select * from roofline
    inner join runs using (device, config_id, pass)
    where op not in ('matmul', 'copy')
),

peers as (
    select
        device,
        op,
        pass,
        shape,
        dtype,
        recorded_at,
        min(time_ms) filter (where implementation in ('sdpa_flash', 'torch'))
            as baseline_time_ms,
        any_value(config_id) filter (where implementation in ('sdpa_flash', 'torch'))
            as baseline_config_id,
        min(time_ms) as best_peer_time_ms,
        arg_min(config_id, time_ms) as best_peer_config_id,
        arg_min(implementation, time_ms) as best_peer_implementation
    from operators
    where status = 'ok' and not own
    group by all
),

compared as (
    select * from operators
    left join peers using (device, op, pass, shape, dtype, recorded_at)
),

intervals as (
    select
        compared.device,
        compared.config_id,
        compared.pass,
        quantile_cont(baseline.time_ms / own.time_ms, [0.025, 0.975]) as against_baseline,
        quantile_cont(best.time_ms / own.time_ms, [0.025, 0.975]) as against_best
    from compared
    inner join resamples as own
        on
            compared.device = own.device
            and compared.config_id = own.config_id
            and compared.pass = own.pass
    left join resamples as baseline
        on
            compared.device = baseline.device
            and compared.baseline_config_id = baseline.config_id
            and compared.pass = baseline.pass
            and own.resample = baseline.resample
    left join resamples as best
        on
            compared.device = best.device
            and compared.best_peer_config_id = best.config_id
            and compared.pass = best.pass
            and own.resample = best.resample
    where compared.status = 'ok'
    group by all
)

select
    device,
    config_id,
    op,
    pass,
    implementation,
    own,
    shape,
    batch,
    n_q,
    n_k,
    n_heads,
    head_dim,
    d_model,
    d_ff,
    d_ff_storage,
    n_components,
    dtype,
    status,
    reason,
    n_replicates,
    time_ms,
    tflops,
    baseline_time_ms,
    baseline_time_ms / time_ms as speedup,
    against_baseline[1] as speedup_low,
    against_baseline[2] as speedup_high,
    best_peer_implementation,
    best_peer_time_ms,
    best_peer_time_ms / time_ms as speedup_best,
    against_best[1] as speedup_best_low,
    against_best[2] as speedup_best_high,
    throttled
from compared
left join intervals using (device, config_id, pass);
