-- Why is a mark hollow in a figure? Its evidence is not complete, for this reason.
select device, kind, config_id, name, pass, why_not
from measurements
where is_current and valid is null
order by all;
