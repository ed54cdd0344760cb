-- Grain: two equal things that were compared as if they were different: two copies of an
-- implementation in one job, or two runs of a step in one session.
--
-- `ratio` is how many times as fast the one seemed, with the 95 % interval `low` to `high`. The
-- truth is 1: any `verdict` of faster or slower is wrong, and `contains_1` should mostly be true.
create or replace view equal_things as
with things as (
    select
        code_version,
        any_value(part) as part,
        any_value(name) as name,
        any_value(shape) as shape
    from measurements
    where is_comparable
    group by code_version
)

select
    contrasts.device,
    contrasts.kind,
    things.part,
    things.shape,
    things.name,
    contrasts.own,
    contrasts.base,
    contrasts.n_pairs,
    contrasts.ratio,
    contrasts.low,
    contrasts.high,
    contrasts.verdict,
    contrasts.low <= 1 and contrasts.high >= 1 as contains_1
from contrasts
inner join things on split_part(contrasts.base, ' ', 1) = things.code_version
where contrasts.figure = 'noise' and contrasts.has_evidence;

-- Grain: device × kind: how the rules that judge all comparisons judge equal things.
--
-- Equal are two contenders of one implementation in a run, and two runs of a step in a session.
-- `n_called` were called faster or slower, which is wrong. The 95 % interval of `n_containing`
-- contains 1, as it should.
create or replace view noise_verdicts as
select
    device,
    kind,
    count(*) as n_comparisons,
    count(*) filter (where verdict in ('faster', 'slower')) as n_called,
    count(*) filter (where verdict = 'same') as n_same,
    count(*) filter (where low <= 1 and high >= 1) as n_containing,
    n_called / n_comparisons as share_called,
    n_containing / n_comparisons as share_containing
from contrasts
where figure = 'noise' and has_evidence
group by device, kind;
