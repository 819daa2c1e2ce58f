"""``megatron-flux slurm``: jobs on clusters that Slurm runs.

In the order of reading: ``fields`` (what a user may put in), ``profile`` (a cluster) and ``job`` (a model on nodes,
checked for that cluster), ``render`` (the job's script, from ``templates/``), ``queue`` (Slurm's own commands),
``status`` (a job's folder, how far it is, why it ended), ``submit`` (and resume), ``collect`` (results side by side),
and ``preflight/``, which job scripts run on their nodes before anything else.
"""
