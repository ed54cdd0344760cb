-- Grain: device × op × pass × implementation × shape: medians over the replicates against what the
-- device itself reached in a large matmul and a memory copy (view `ceilings`); null where a
-- replicate failed. `own` are this project's implementations, all others are its peers. Where only
-- bytes are counted (`flops` is null) the memory copy is the roofline. Not `auto`, which is one of
-- the others: view `auto_regret` has it.
create or replace view roofline as
with operators as (
    select
        device,
        config_id,
        op,
        pass,
        implementation,
        any_value(role) = 'own' as own,
        shape,
        any_value(batch) as batch,
        any_value(n_q) as n_q,
        any_value(n_k) as n_k,
        any_value(n_heads) as n_heads,
        any_value(head_dim) as head_dim,
        any_value(d_model) as d_model,
        any_value(d_ff) as d_ff,
        any_value(d_ff_storage) as d_ff_storage,
        any_value(n_components) as n_components,
        any_value(dtype) as dtype,
        count(*) as n_replicates,
        case when bool_or(status = 'ok') then 'ok' else arg_max(status, recorded_at) end as status,
        arg_max(reason, recorded_at) filter (where reason != '') as reason,
        any_value(flops) as flops,
        any_value(bytes) as bytes,
        median(time_ms_p50) as median_ms,
        bool_or(throttled) as throttled
    from current_ops
    where implementation != 'auto' and not coalesce(twin, false)
    group by device, config_id, op, pass, implementation, shape
),

timed as (
    select
        * exclude (median_ms),
        case when status = 'ok' then median_ms end as time_ms,
        coalesce(flops, 0) / bytes as intensity,
        flops / (time_ms * 1e9) as tflops,
        bytes / (time_ms * 1e6) as gb_per_s
    from operators
),

bounds as (
    select
        *,
        ceiling_tflops * 1000 / ceiling_gb_per_s as ridge,
        case when intensity >= ridge then 'compute' when intensity < ridge then 'memory' end
            as bound,
        case bound
            when 'compute' then flops / (ceiling_tflops * 1e9)
            when 'memory' then bytes / (ceiling_gb_per_s * 1e6)
        end as shortest_ms
    from timed
    left join ceilings using (device)
),

intervals as (
    select
        device,
        config_id,
        pass,
        quantile_cont(time_ms, 0.025) as time_ms_low,
        quantile_cont(time_ms, 0.975) as time_ms_high
    from resamples
    group by all
)

select
    bounds.* exclude (ridge, shortest_ms),
    time_ms_low,
    time_ms_high,
    case when bound is not null then least(ceiling_tflops, intensity * ceiling_gb_per_s / 1000) end
        as roofline_tflops,
    shortest_ms / time_ms as share_of_roofline,
    shortest_ms / time_ms_high as share_low,
    shortest_ms / time_ms_low as share_high
from bounds
left join intervals using (device, config_id, pass);
