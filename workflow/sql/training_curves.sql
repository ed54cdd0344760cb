-- Grain: device × run × step. `gap_closed`: 0 is the prior, 1 the exact posterior.
--
-- `nats_from_context` is what the true context gains over the shuffled one, null inside two
-- standard errors: the model is then not shown to use its context.
create or replace view training_curves as
select
    * exclude (environment_id, recorded_at),
    (heldout_log_likelihood - prior_log_likelihood) / (exact_log_likelihood - prior_log_likelihood)
        as gap_closed,
    case
        when
            heldout_log_likelihood - heldout_log_likelihood_shuffled
            > 2 * coalesce(heldout_log_likelihood_stderr, 0)
            then heldout_log_likelihood - heldout_log_likelihood_shuffled
    end as nats_from_context
from current_training;
