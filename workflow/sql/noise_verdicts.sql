-- Grain: device × kind: how equal things are judged, by the rules that judge all others.
--
-- Equal are two contenders of one implementation in a run, and two runs of a step in a sitting.
-- `n_called` were said to be faster or slower, which is wrong; of `n_containing` the 95 % interval
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
