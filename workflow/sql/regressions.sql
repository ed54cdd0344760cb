-- Grain: device × comparison_key × code version that followed another: whether it is faster or
-- slower.
--
-- Each of the two was timed against a control: another contender of the same sessions that did not
-- change in between. `ratio` compares these two ratios, so it is free of a drift of the machine.
-- Without a control there are only the two medians, no ratio and no verdict.
create or replace view regressions as
select
    contenders.device,
    contenders.comparison_key,
    contenders.kind,
    contenders.name,
    contenders.code_version,
    contenders.previous_code_version,
    contenders.first_started_at,
    contenders.previous_started_at,
    exp(contenders.log_ms) as time_ms,
    exp(contenders.previous_log_ms) as previous_time_ms,
    controls.comparison_key as control,
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
        and contenders.code_version = contrasts.own
        and contenders.previous_code_version = contrasts.base
left join contenders as controls on contrasts.control = controls.code_version
where contenders.is_comparable and contenders.previous_code_version is not null;
