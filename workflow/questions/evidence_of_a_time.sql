-- Which code and which gates back a time? Its name stands at `like`: write another one there.
select m.config_id, m.pass, m.run, m.valid, m.why_not,
    list(distinct concat_ws(' ', gate, passed, deciding_run)) filter (concerned) as gates,
    list_sort(list(distinct concat_ws(' ', p.part, p.name, p.hash))) as code
from measurements as m left join gate_evidence using (device, run, uses)
left join code on m.run_id = code.run_id and m.code_of = code.implementation
left join code_parts as p using (code_set)
where m.is_current and m.config_id like 'attention--small--%'
group by all
order by all;
