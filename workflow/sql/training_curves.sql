-- Grain: device × run × step. `gap_closed`: 0 is the prior, 1 the exact posterior.
create or replace view training_curves as
select
    * exclude (environment_id, recorded_at),
    (heldout_log_likelihood - prior_log_likelihood) / (exact_log_likelihood - prior_log_likelihood)
        as gap_closed
from current_training;
