-- Grain: device × problem × pass × with_launches × implementation: microseconds of the host for an
-- eager call, as the median over the runs of the newest commit.
--
-- `times_base` is how many times as long the call takes as PyTorch's plain form, or, where launches
-- were replaced by nothing, as an empty autograd.Function.
create or replace view host as
with newest as (
    select * from stg_host_calls
    where status = 'ok'
    qualify
        git_commit is not distinct from arg_max(git_commit, recorded_at)
            over (partition by device, op, problem)
),

medians as (
    select
        device,
        op,
        problem,
        pass,
        with_launches,
        implementation,
        median(host_us_p50) as host_us,
        min(host_us_p50) as host_us_low,
        max(host_us_p50) as host_us_high,
        count(*) as n_runs,
        min(recorded_at) as first_recorded_at,
        max(recorded_at) as recorded_at
    from newest
    group by all
),

compared as (
    select
        medians.*,
        base.host_us as base_us,
        base.implementation as base_implementation
    from medians
    left join implementations
        on medians.op = implementations.op and implementations.rank = 0
    left join medians as base
        on
            medians.device = base.device
            and medians.op = base.op
            and medians.problem = base.problem
            and medians.pass = base.pass
            and medians.with_launches = base.with_launches
            and base.implementation = case
                when medians.with_launches then implementations.implementation
                else 'bare_function'
            end
)

select
    * exclude (base_us),
    host_us / base_us as times_base
from compared;
