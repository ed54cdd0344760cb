-- Grain: device × question × generation that followed another: whether it is faster or slower.
--
-- A generation is compared with the one before by what each was against a control, something else
-- that was timed in the same sittings and did not change in between: so `ratio` is free of what
-- moved the whole machine. Without a control there is no ratio and no verdict, only the two
-- medians.
create or replace view regressions as
select
    contenders.device,
    contenders.question,
    contenders.kind,
    contenders.name,
    contenders.generation,
    contenders.previous_generation,
    contenders.first_started_at,
    contenders.previous_started_at,
    exp(contenders.log_ms) as time_ms,
    exp(contenders.previous_log_ms) as previous_time_ms,
    controls.question as control,
    contrasts.ratio,
    contrasts.low,
    contrasts.high,
    contrasts.q,
    contrasts.verdict,
    contrasts.n_pairs
from contenders
left join contrasts
    on
        contrasts.figure = 'regressions'
        and contenders.generation = contrasts.own
        and contenders.previous_generation = contrasts.base
left join contenders as controls on contrasts.control = controls.generation
where contenders.may_count and contenders.previous_generation is not null;
