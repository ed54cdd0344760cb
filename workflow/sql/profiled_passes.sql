-- Grain: device × op × problem × implementation × pass: its newest profile by Nsight Compute, as
-- totals over its kernels and as the limits of the kernel that takes longest.
--
-- `duration_us` is the sum over the `n_kernels` kernels of one launch, `dominant_share` the longest
-- kernel's share of it. Percentages, registers and stalls are the longest kernel's. A failed
-- profile appears only if no profile succeeded. Kernels were launched one by one with cold caches:
-- these times are not for comparison.
create or replace view profiled_passes as
with newest as (
    select * from stg_profiles
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
