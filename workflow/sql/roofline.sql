-- Grain: device × comparison_key, one pass of an operator: its medians against the rates that the
-- device itself reached in a large matmul and a memory copy (view `ceilings`).
--
-- The matmul is in the number format that the implementation computes in, or in 16 bits where that
-- format was not measured. An operator that writes less than a tenth of its bytes is held against a
-- sum that only reads, where one was measured, and otherwise against the copy. Operators without
-- FLOPs have the copy as their roofline. `share_low` and `_high` are the longest and the shortest
-- run's. Invalid rows have no share. `own` marks this project's implementations.
--
-- Two kinds of rows are left out. `auto` runs one of the other implementations: see view
-- `auto_regret`. Latencies are in view `latency`.
create or replace view roofline as
with timed as (
    select
        *,
        coalesce(flops, 0) / bytes as intensity,
        flops / (time_ms * 1e9) as tflops,
        bytes / (time_ms * 1e6) as gb_per_s
    from summaries
    where
        kind = 'operator' and implementation != 'auto' and timing is distinct from 'latency'
),

limits as (
    select
        timed.*,
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
    columns([
        'device', 'comparison_key', 'code_version', 'op', 'pass', 'implementation', 'role', 'shape',
        'batch', 'n_q', 'n_k', 'n_heads', 'head_dim', 'd_model', 'd_ff', 'd_ff_storage',
        'n_components', 'dtype', 'problem', 'config_id', 'status', 'reason', 'valid', 'gated',
        'why_not', 'n_runs', 'n_failed', 'time_ms', 'time_ms_low', 'time_ms_high', 'plan_ms',
        'throttled', 'flops', 'bytes', 'intensity', 'tflops', 'gb_per_s', 'ceiling_tflops',
        'ceiling_gb_per_s', 'bound'
    ]),
    role = 'own' as own,
    case when bound is not null then least(ceiling_tflops, intensity * ceiling_gb_per_s / 1000) end
        as roofline_tflops,
    case when coalesce(valid, true) then shortest_ms / time_ms end as share_of_roofline,
    share_of_roofline * time_ms / time_ms_high as share_low,
    share_of_roofline * time_ms / time_ms_low as share_high
from bounds;
