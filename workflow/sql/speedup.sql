-- Grain: device × study × shape × variant × checkpoint × cuda_graph, of whole training steps.
--
-- `speedup` is against plain sdpa_flash, `speedup_best` against the fastest PyTorch configuration,
-- both of the same device, shape and dtype; intervals are of the ratio, 95 % bootstrap.
-- `win`: the interval lies above 1 by more than `aa_spread`, what equal steps differ by on the
-- device: the largest distance of a replicate from its configuration's median, median over the
-- configurations. Unknown without replicates, and then nothing wins.
create or replace view speedup as
with configurations as (
    select * from step_summary
    where optimizer and study != 'ablation'  -- which has a view of its own
),

distances as (
    select
        device,
        config_id,
        max(abs(step_ms_p50 / step_ms - 1)) as distance
    from current_steps
    inner join configurations using (device, config_id)
    where n_replicates > 1
    group by device, config_id
),

spreads as (
    select
        device,
        median(distance) as aa_spread
    from distances
    group by device
),

-- Where several studies timed the baseline, the one with most replicates.
baselines as (
    select
        device,
        shape,
        batch,
        n_context,
        n_target,
        dtype,
        arg_min(config_id, (-n_replicates, config_id)) as baseline_config_id,
        arg_min(step_ms, (-n_replicates, config_id)) as baseline_step_ms
    from configurations
    where status = 'ok' and variant = 'sdpa_flash' and not checkpoint and not cuda_graph
    group by all
),

best_pytorch as (
    select
        device,
        shape,
        batch,
        n_context,
        n_target,
        dtype,
        arg_min(config_id, step_ms) as best_pytorch_config_id,
        arg_min(variant, step_ms) as best_pytorch_variant,
        min(step_ms) as best_pytorch_step_ms
    from configurations
    where status = 'ok' and starts_with(variant, 'sdpa_')
    group by all
),

compared as (
    select * from configurations
    left join baselines using (device, shape, batch, n_context, n_target, dtype)
    left join best_pytorch using (device, shape, batch, n_context, n_target, dtype)
    left join spreads using (device)
),

step_resamples as (
    select
        device,
        config_id,
        resample,
        time_ms
    from resamples
    where pass = 'step'
),

intervals as (
    select
        compared.device,
        compared.config_id,
        quantile_cont(baseline.time_ms / own.time_ms, [0.025, 0.975]) as against_baseline,
        quantile_cont(best.time_ms / own.time_ms, [0.025, 0.975]) as against_best
    from compared
    inner join step_resamples as own
        on compared.device = own.device and compared.config_id = own.config_id
    left join step_resamples as baseline
        on
            compared.device = baseline.device
            and compared.baseline_config_id = baseline.config_id
            and own.resample = baseline.resample
    left join step_resamples as best
        on
            compared.device = best.device
            and compared.best_pytorch_config_id = best.config_id
            and own.resample = best.resample
    where compared.status = 'ok'
    group by all
)

select
    device,
    config_id,
    study,
    shape,
    variant,
    batch,
    n_context,
    n_target,
    dtype,
    checkpoint,
    cuda_graph,
    status,
    reason,
    n_replicates,
    step_ms,
    baseline_step_ms,
    baseline_step_ms / step_ms as speedup,
    against_baseline[1] as speedup_low,
    against_baseline[2] as speedup_high,
    best_pytorch_variant,
    best_pytorch_step_ms,
    best_pytorch_step_ms / step_ms as speedup_best,
    against_best[1] as speedup_best_low,
    against_best[2] as speedup_best_high,
    aa_spread,
    coalesce(against_baseline[1] > 1 + aa_spread, false) as win,
    gate_passed,
    throttled
from compared
left join intervals using (device, config_id);
