-- Grain: device × question, of one pass of an operator: medians over the runs of the current
-- generation against what the device itself reached in a large matmul and a memory copy (view
-- `ceilings`).
--
-- The matmul is one in the number format that the implementation computes in, or in 16 bits where
-- that one was not measured. What writes less than a tenth of the bytes that it moves is held
-- against a sum that only reads, where that was measured, in place of the copy.
--
-- Which runs are used is as in view `step_summary`. `own` are this project's implementations. Where
-- only bytes are counted (`flops` is null) the memory copy is the roofline. `share_low` and `_high`
-- are of the longest and the shortest run; there is no share of what is known not to count. Not
-- `auto`, which is one of the others: view `auto_regret` has it. Nor latency: view `latency`.
create or replace view roofline as
with runs as (
    select
        *,
        status = 'ok' as timed,
        coalesce(
            standing(status, counts)
            = max(standing(status, counts)) over (partition by device, question),
            false
        ) as is_used
    from current_ops
    where
        implementation != 'auto'
        and not coalesce(twin, false)
        and timing is distinct from 'latency'
),

operators as (
    select
        device,
        question,
        any_value(columns([
            'generation', 'op', 'pass', 'implementation', 'role', 'shape', 'batch', 'n_q', 'n_k',
            'n_heads', 'head_dim', 'd_model', 'd_ff', 'd_ff_storage', 'n_components', 'dtype',
            'flops', 'bytes', 'bytes_written', 'precision', 'problem'
        ])),
        min(config_id) as config_id,
        any_value(role) = 'own' as own,
        case when bool_or(timed) then 'ok' else arg_max(status, recorded_at) end as status,
        coalesce(
            arg_max(reason, recorded_at) filter (where is_used and reason != ''),
            arg_max(reason, recorded_at) filter (where reason != '')
        ) as reason,
        any_value(counts) filter (where is_used) as counts,
        any_value(proven) filter (where is_used) as proven,
        arg_max(why_not, recorded_at) filter (where is_used or not timed) as why_not,
        count(*) filter (where is_used) as n_runs,
        count(*) filter (where not timed) as n_failed,
        median(time_ms_p50) filter (where is_used) as time_ms,
        min(time_ms_p50) filter (where is_used) as time_ms_low,
        max(time_ms_p50) filter (where is_used) as time_ms_high,
        median(plan_ms) filter (where is_used) as plan_ms,
        bool_or(throttled) filter (where is_used) as throttled
    from runs
    group by device, question
),

timed as (
    select
        *,
        coalesce(flops, 0) / bytes as intensity,
        flops / (time_ms * 1e9) as tflops,
        bytes / (time_ms * 1e6) as gb_per_s
    from operators
),

limits as (
    select
        timed.* exclude (bytes_written, precision),
        coalesce(own.tflops, ceilings.ceiling_tflops) as ceiling_tflops,
        case
            when bytes_written < 0.1 * bytes then coalesce(ceiling_read_gb_per_s, ceiling_gb_per_s)
            else ceiling_gb_per_s
        end as ceiling_gb_per_s
    from timed
    left join ceilings using (device)
    left join format_ceilings as own
        on
            timed.device = own.device
            and own.op = 'ceiling_matmul'
            and own.dtype = coalesce(nullif(timed.precision, ''), timed.dtype)
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
    from limits
)

select
    * exclude (ridge, shortest_ms),
    case when bound is not null then least(ceiling_tflops, intensity * ceiling_gb_per_s / 1000) end
        as roofline_tflops,
    case when coalesce(counts, true) then shortest_ms / time_ms end as share_of_roofline,
    share_of_roofline * time_ms / time_ms_high as share_low,
    share_of_roofline * time_ms / time_ms_low as share_high
from bounds;
