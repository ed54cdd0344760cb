-- Grain: device × environment_id × origin: what the rows were measured with, and when.
create or replace view environment_summary as
select
    device,
    environment_id,
    origin,
    arg_max(columns(* exclude (device, environment_id, origin, recorded_at)), recorded_at),
    min(recorded_at) as first_recorded_at,
    max(recorded_at) as last_recorded_at,
    count(*) as n_measurements
from environments
group by device, environment_id, origin;
