-- topic: evidence
-- # Tolerances
-- Gate `tolerances` holds the forward pass of our kernels to two plain bounds. In float16 a result
-- is within 0.001 of float64, or within one unit in the last place of the largest result if that is
-- more. In bfloat16 attention is within 0.01 of PyTorch's at small, mid and large. A line shows the
-- check that is nearest to its bound, or furthest beyond. A device on which the gate has not run
-- has no line.
select
    device,
    op as operator,
    implementation,
    problem ->> 'dtype' as dtype,
    count(distinct problem) as cases,
    arg_max(value, value / bound) as worst_error,
    arg_max(bound, value / bound) as bound,
    case when bool_and(passed) then 'within' else 'beyond' end as verdict
from current_gates
where gate = 'tolerances' and implementation != ''
group by all
order by device asc, operator asc, implementation asc, dtype asc;
