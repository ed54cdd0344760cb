-- Grain: sample. One that took long.
create view slow as from samples where time_ms > 0.5;
