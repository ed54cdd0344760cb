-- Grain: device × op × shape × dtype: the choice of `auto`, and how much slower it is than the best
-- of its candidates, forward and backward together, all timed in turn in the same runs.
--
-- `regret` compares auto as it was timed. Where it chose the best, what remains is the difference
-- between two timings of one implementation. `regret_of_choice` compares the chosen
-- implementation's own timing. `has_evidence`: all of these times are valid. `tuned_on`: the table
-- has an entry of this very shape. Implementations that `auto` does not choose from are no
-- candidates, however fast.
create or replace view auto_regret as
with automatic as (
    select
        device,
        op,
        shape,
        dtype,
        batch,
        n_q,
        n_k,
        launch_config ->> 'implementation' as chosen,
        launch_config ->> 'source' as source,
        has_evidence,
        time_ms
    from operator_training
    where implementation = 'auto'
),

chosen_from_these as (
    select
        device,
        op,
        shape,
        dtype,
        map(list(implementation), list(time_ms)) as times_ms,
        arg_min(implementation, time_ms) as best_implementation,
        min(time_ms) as best_time_ms,
        bool_and(has_evidence) as have_evidence
    from operator_training
    inner join implementations using (op, implementation)
    where chosen_from and time_ms is not null
    group by device, op, shape, dtype
)

select
    automatic.* exclude (has_evidence),
    source = 'tuned' as tuned_on,
    best_implementation,
    best_time_ms,
    time_ms / best_time_ms - 1 as regret,
    times_ms[chosen] / best_time_ms - 1 as regret_of_choice,
    coalesce(has_evidence and have_evidence, false) as has_evidence
from automatic
left join chosen_from_these using (device, op, shape, dtype);
