-- Grain: device × run × step: a recorded line of a training run, from the newest process that
-- trained it on the device. `run` is the training's name in config.yaml.
--
-- Early rows have no `baseline`: two runs of theirs were compared with one.
create or replace view stg_training as
with trainings as (
    select
        * replace (
            coalesce(
                baseline,
                case when run in ('gp_small_fused', 'gp_small_flash') then 'sdpa_cudnn_padded' end
            ) as baseline
        ),
        run_of(run_id, device, recorded_at) as process
    from training
)

select * from trainings
qualify
    process = arg_max(process, row(recorded_at, process)) over (partition by device, run)
    and row_number() over (partition by device, process, run, step order by origin) = 1;
