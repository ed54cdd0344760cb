-- topic: evidence
-- # Not measured again yet
-- These rows were recorded before rows kept their evidence: the code, the GPU, and the gates of
-- that very code. They have no interval and no verdict until they are measured again. Figures draw
-- them hollow, and stages pale.
with standing_without as (
    select
        device,
        'step' as what,
        shape,
        variant || case when checkpoint then ', checkpointing' else '' end
        || case when cuda_graph then ', CUDA graph' else '' end
        || case when not optimizer then ', without optimizer' else '' end as name,
        recorded_at
    from current_steps
    where run_id is null and status = 'ok' and study != 'ablation'
    union all
    select
        device,
        'step of the ablation' as what,
        shape,
        variant as name,
        recorded_at
    from current_steps
    where run_id is null and status = 'ok' and study = 'ablation'
    union all
    select
        device,
        op || ', ' || pass as what,
        shape,
        implementation as name,
        recorded_at
    from current_ops
    where run_id is null and status = 'ok'
    union all
    select
        device,
        'training run' as what,
        source || ', ' || n_context || ' context points' as shape,
        run as name,
        recorded_at
    from stg_training
    where run_id is null
),

by_shape as (
    select
        device,
        what,
        shape,
        string_agg(distinct name, '; ' order by name) as names,
        max(recorded_at) as recorded_at
    from standing_without
    group by device, what, shape
)

select
    device,
    what,
    string_agg(shape, ', ' order by shape) as shapes,
    names,
    strftime(max(recorded_at) at time zone 'UTC', '%Y-%m-%d') as recorded_on
from by_shape
group by device, what, names
order by device asc, what like 'step%' desc, what asc, shapes asc;
