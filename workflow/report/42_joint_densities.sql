-- # Joint densities
-- Log-likelihood of all targets together after training, in nats a target, of held-out tasks:
-- through the buffer, and of the same model with the context encoded again for each target. "Error"
-- is the standard error of the difference.
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
