-- Grain: device × gate × implementation × check × metric, of each gate's last run on the device:
-- a check that the gate no longer makes is not in it.
create or replace view current_gates as
select * from gates
qualify dense_rank() over (partition by device, gate order by recorded_at desc, origin asc) = 1;
