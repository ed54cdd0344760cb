-- Grain: device × run: the joint log-likelihood of a training run's model with a buffer after its
-- last step, in nats per target value of held-out tasks: through the buffer, and of the same model
-- with the context encoded again for each target. `difference` is the first less the second, and
-- `standard_error` its own, over the tasks.
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
from current_training
where joint_log_likelihood is not null
qualify row_number() over (partition by device, run order by step desc) = 1;
