-- # How well the model learns
-- Training runs are judged at their end, on tasks that they were not trained on. The value is the
-- mean log-likelihood of a target in nats, with its 95 % interval; higher is better. "Shuffled" has
-- the context's values interchanged: a model that uses its context must fall below the interval
-- there. The last column says how far a run came from the prior, 0 %, to the exact posterior, 100
-- %, where that is known. Runs of several seeds have a table of their own below.
select
    device,
    run,
    variant,
    source,
    n_context as context_points,
    step as steps,
    format(
        '{:.3f} ± {:.3f}', heldout_log_likelihood, 1.96 * heldout_log_likelihood_stderr
    ) as held_out,
    format('{:.3f}', heldout_log_likelihood_shuffled) as shuffled,
    case when nats_from_context is not null then 'yes' else 'not shown' end as uses_its_context,
    format('{:.0f} %', 100 * gap_closed) as of_the_way
from training_curves
where
    heldout_log_likelihood is not null
    and coalesce(recipe, '') not in (
        select recipe from training_seeds
        where n_seeds > 1
    )
qualify row_number() over (partition by device, run order by step desc) = 1
order by device, run;
