-- Which code and which gate back a time? One line per timed row and gate that it waited for.
select evidence.config_id, evidence.pass, evidence.recorded_at, evidence.counts, evidence.why_not,
    gate, passed as gate_passed, deciding_run, list(distinct code.part || ' ' || code.name) as code
from evidence
inner join gate_evidence using (device, run)
left join code on evidence.run = code.run_id and gate_evidence.implementation = code.implementation
where evidence.config_id like '%small%'
group by all
order by all;
