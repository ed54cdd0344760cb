-- Grain: device. The longest sample.
create table slowest as select device, max(time_ms) as time_ms from slow group by device;
