-- Grain: device × comparison_key: a training step's medians over the runs of its current code
-- version.
--
-- View `summaries` says which runs these are. `mfu` is a share of the matmul ceiling. It and
-- `tflops` are null where the first rows with `skip_unread` counted work that was left out.
-- `varies` marks streams of tasks whose sizes vary, and failures at their shapes. `products_in`
-- says in words which number format products have. For 8 bits it adds the `variant_verdict` of view
-- `training_seeds`.
create or replace view step_summary as
with trained as (
    select distinct
        device,
        variant,
        variant_verdict as trains
    from training_seeds
    where products = ''
)

select
    columns([
        'device', 'comparison_key', 'varies', 'code_version', 'shape', 'variant', 'role', 'batch',
        'n_context', 'n_target', 'dtype', 'checkpoint', 'cuda_graph', 'optimizer', 'config_id',
        'studies', 'study', 'status', 'reason', 'valid', 'gated', 'why_not', 'n_runs', 'n_failed',
        'tokens_per_s', 'peak_memory_bytes', 'energy_j', 'padded_share', 'throttled',
        'environment_id', 'operators', 'gates'
    ]),
    coalesce(precision, '') as precision,
    format_cell(dtype, precision, trains) as products_in,
    time_ms as step_ms,
    time_ms_low as step_ms_low,
    time_ms_high as step_ms_high,
    step_ms_wall,
    work / time_ms as tflops,
    tflops / ceiling_tflops as mfu
from summaries
left join ceilings using (device)
left join trained using (device, variant)
where kind = 'step';
