-- Macro: the run that a row is of. Rows from before runs had a name are of one run where device and
-- `recorded_at` are equal.
create or replace macro run_of(run_id, device, recorded_at) as
coalesce(run_id, concat(device, ' ', strftime(recorded_at, '%Y-%m-%dT%H:%M:%S.%fZ')));
