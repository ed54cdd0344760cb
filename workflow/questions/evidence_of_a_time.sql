-- Which code (kernels, packages) and which gate back a time? A line per row and gate.
select config_id, pass, counts, why_not, gate, passed as gate_passed, deciding_run,
    list_sort(list(distinct concat_ws(' ', code.part, code.name, code.hash))) as code
from measurements
inner join evidence using (device, run, config_id, pass)
inner join gate_evidence as gates
    on measurements.run = gates.run and measurements.code_of = gates.implementation
left join code on measurements.run = code.run_id and measurements.code_of = code.implementation
where config_id like 'attention--small%' and code.part != 'module'
group by all
order by all;
