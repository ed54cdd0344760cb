-- Grain: device × run × step: the loss of a training run minus the loss of run `gp_small_sdpa`.
--
-- Both runs have the same tasks and start from the same weights (`source`, sizes, dtype, seed,
-- learning rates). The steps are the logged ones of the last half.
create or replace view training_differences as
with schedules as (
    select
        device,
        run,
        list(learning_rate order by step) as learning_rates
    from stg_training
    group by device, run
),

logged as (
    select
        *,
        max(step) over (partition by device, run) as last_step
    from stg_training
    inner join schedules using (device, run)
    where loss is not null
)

select
    logged.device,
    logged.run,
    logged.variant,
    baseline.run as baseline_run,
    baseline.variant as baseline_variant,
    logged.step,
    logged.loss - baseline.loss as difference
from logged
inner join logged as baseline
    using (
        device, source, batch, n_context, n_target, dtype, seed, step, last_step, learning_rates
    )
where
    baseline.run = 'gp_small_sdpa'
    and logged.run != baseline.run
    and logged.step > logged.last_step / 2;
