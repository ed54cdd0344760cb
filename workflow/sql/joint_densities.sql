-- Grain: device × run: the joint log-likelihood of a training run's model with a buffer after its
-- last step, in nats per target value of held-out tasks.
--
-- It is given through the buffer, and for the same model with the context encoded again for each
-- target. `difference` is the first minus the second; `standard_error` is its own, over the tasks.
create or replace view joint_densities as
select
    device,
    run,
    variant,
    batch,
    n_context,
    n_target,
    step,
    joint_log_likelihood,
    joint_log_likelihood_anew,
    joint_log_likelihood - joint_log_likelihood_anew as difference,
    joint_difference_stderr as standard_error
from stg_training
where joint_log_likelihood is not null
qualify row_number() over (partition by device, run order by step desc) = 1;
