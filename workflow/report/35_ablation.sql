-- # Worth of each component
-- "Gains added" is the time that a step saves when the component alone is added to PyTorch with
-- cuDNN's attention and a padded hidden width, uncompiled. "Gains last" is the time that it saves
-- when it is added to all others of ours. `skip_unread` leaves out rows that reach no result.
select
    device,
    shape,
    component,
    gain_alone_ms as "gains_added,_ms",
    verdict_alone as verdict_added,
    gain_last_ms as "gains_last,_ms",
    verdict_last,
    evidence_cell(valid, why_not) as evidence
from ablation
where status = 'ok'
order by device, shape, greatest(gain_alone_ms, gain_last_ms) desc;
