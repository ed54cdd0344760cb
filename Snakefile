# From config.yaml to figures: gates, benchmarks, training, the store, the charts.
#   snakemake --cores 1 all        snakemake --cores 1 figures          snakemake -n all
import sys

sys.path.insert(0, workflow.basedir)  # `tnp` and `workflow` are this checkout's

from workflow.configuration import places

CONFIG = "config.yaml"
try:
    WRITTEN = places(
        CONFIG, workflow.overwrite_configfiles, workflow.config_settings.config
    )
except ValueError as error:
    sys.exit(str(error))


configfile: CONFIG


include: "workflow/rules/common.smk"
include: "workflow/rules/gates.smk"
include: "workflow/rules/benchmarks.smk"
include: "workflow/rules/training.smk"
include: "workflow/rules/tuning.smk"
include: "workflow/rules/studies.smk"
include: "workflow/rules/results.smk"


localrules:
    all,


# Here, because an included file cannot name the default target.
rule all:
    default_target: True
    input:
        of_plan,
        drawn,
    log:
        "data/runs/logs/results.log",
    script:
        "workflow/scripts/results.py"
