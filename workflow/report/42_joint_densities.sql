-- # Joint densities
-- The values are log-likelihoods of all targets together after training, in nats a target, of
-- held-out tasks. One column is through the buffer. The other encodes the context again for each
-- target, with the same model. "Error" is the standard error of the difference.
select
    device,
    run,
    step as steps,
    joint_log_likelihood as through_the_buffer,
    joint_log_likelihood_anew as anew,
    difference,
    standard_error as error
from joint_densities
order by device, run;
