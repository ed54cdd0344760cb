-- Grain: device × config_id × replicate, as it was measured last.
create or replace view current_steps as
select * from steps
qualify
    row_number()
        over (partition by device, config_id, replicate order by recorded_at desc, origin asc)
    = 1;
