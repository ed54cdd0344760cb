-- Grain: device × run × config_id: the measured steps of each comparison key's current code
-- version, failed ones included.
create or replace view current_steps as
select
    columns(
        lambda name: not regexp_matches(
            name,
            '^(time_ms_.*|op|implementation|n_[qk]|n_heads|head_dim|d_.*|n_components|bytes.*'
            || '|gb_per_s|max_.*error|twin|problem|draw|provider|packages|rank|precision'
            || '|with_forward|forced|timing|plan_ms|form|is_current)$'
        )
    )
from measurements
where kind = 'step' and is_current;

-- Grain: device × run × config_id × pass: the measured operators of each comparison key's current
-- code version, failed ones included and tuning trials left out.
create or replace view current_ops as
select
    columns(
        lambda name: not regexp_matches(
            name,
            '^(step_ms_.*|study|variant|n_context|n_target|checkpoint|cuda_graph|optimizer'
            || '|tokens_per_s|mfu|operators|choices|energy_j|varies|padded_share|form'
            || '|max_relative_error|forced|is_current)$'
        )
    )
from measurements
where kind = 'operator' and is_current and forced is null;
