-- Grain: device × op × problem × implementation × pass: what Nsight Compute counted in its newest
-- profile, as totals of its kernels and as what limits the dominant one, which takes longest.
--
-- `duration_us` is the sum over the `n_kernels` kernels that one launch of the pass consists of,
-- `dominant_share` what the dominant one has of it. Percentages, registers and stalls are of the
-- dominant kernel. A failed profile is shown where there is no other. Times are of kernels that
-- were launched one by one with cold caches: nothing is compared by them.
create or replace view profiled_passes as
with newest as (
    select
        *,
        run_of(run_id, device, recorded_at) as run
    from profiles
    qualify
        rank()
            over (
                partition by device, op, problem, implementation, pass
                order by status != 'ok' asc, recorded_at desc, run asc
            )
        = 1
)

select
    newest.* exclude (run_id, run, origin, launch, duration_us),
    coalesce(implementations.provider = 'own', false) as own,
    count(kernel) over of_pass as n_kernels,
    sum(duration_us) over of_pass as duration_us,
    newest.duration_us / sum(newest.duration_us) over of_pass as dominant_share
from newest
left join implementations using (op, implementation)
window of_pass as (partition by device, op, problem, implementation, pass)
qualify row_number() over (
    partition by device, op, problem, implementation, pass
    order by newest.duration_us desc nulls last, newest.launch asc
) = 1;
