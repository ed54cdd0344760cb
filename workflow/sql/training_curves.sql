-- Grain: device × run × step: a training run's losses and held-out likelihoods.
--
-- `gap_closed` is 0 for the prior and 1 for the exact posterior. `nats_from_context` is the gain of
-- the true context over the shuffled one. It is null within two standard errors: then the model is
-- not shown to use its context.
create or replace view training_curves as
select
    * exclude (environment_id, recorded_at, process),
    (heldout_log_likelihood - prior_log_likelihood) / (exact_log_likelihood - prior_log_likelihood)
        as gap_closed,
    case
        when
            heldout_log_likelihood - heldout_log_likelihood_shuffled
            > 2 * coalesce(heldout_log_likelihood_stderr, 0)
            then heldout_log_likelihood - heldout_log_likelihood_shuffled
    end as nats_from_context
from stg_training;
