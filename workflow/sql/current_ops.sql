-- Grain: device × config_id × replicate × pass, as it was measured last.
create or replace view current_ops as
select * from ops
qualify
    row_number()
        over (partition by device, config_id, replicate, pass order by recorded_at desc, origin asc)
    = 1;
