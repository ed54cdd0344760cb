-- Grain: device × run × step: the loss of a training run minus the loss of its baseline.
--
-- Both runs have the same tasks and start from the same weights (`source`, sizes, dtype, seed,
-- learning rates, `recipe`). The baseline is the newest such run of variant `baseline`. The steps
-- are the logged ones of the last half.
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
        coalesce(recipe, '') as settings,
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
    on
        logged.baseline = baseline.variant
        and logged.device = baseline.device
        and logged.source = baseline.source
        and logged.batch = baseline.batch
        and logged.n_context = baseline.n_context
        and logged.n_target = baseline.n_target
        and logged.dtype = baseline.dtype
        and logged.seed = baseline.seed
        and logged.settings = baseline.settings
        and logged.step = baseline.step
        and logged.last_step = baseline.last_step
        and logged.learning_rates = baseline.learning_rates
where logged.step > logged.last_step / 2
qualify
    row_number() over (
        partition by logged.device, logged.run, logged.step
        order by baseline.recorded_at desc, baseline.run asc
    ) = 1;
