-- Grain: device × run × step, of each run's last training on the device.
create or replace view current_training as
select * from training
qualify dense_rank() over (partition by device, run order by recorded_at desc, origin asc) = 1;
