-- Which code and which gates back a time? Its name stands at `like`: write another one there.
-- `select * from code_parts where code_set = …` has the names and hashes of a row's code.
select m.config_id, m.pass, m.run, m.valid, m.why_not,
    list(distinct concat_ws(' ', gate, passed, deciding_run)) filter (concerned) as gates,
    list(distinct code_set) as code_sets
from measurements as m left join gate_evidence using (device, run, uses)
left join code on m.run_id = code.run_id and m.code_of = code.implementation
where m.is_current and m.config_id like 'attention--small--%'
group by all
order by all;
