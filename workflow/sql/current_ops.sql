-- Grain: as `judged_ops`, of each question's current generation.
create or replace view current_ops as
select * exclude (is_current, started_at) from judged_ops
where is_current;
