-- Grain: as `judged_steps`, of each question's current generation.
create or replace view current_steps as
select * exclude (is_current, started_at) from judged_steps
where is_current;
