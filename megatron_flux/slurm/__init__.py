"""``megatron-flux slurm``: jobs on clusters that Slurm runs.

In the order of reading: ``profile`` (what a user may say of a cluster), ``job`` (a model on nodes, checked for that
cluster, and the job's script, from ``templates/``), ``queue`` (Slurm's own commands), ``status`` (a job's folder: how
far it is, why it ended, its results side by side), ``submit`` (and resume), and ``preflight/``, which job scripts run
on their nodes before anything else.
"""
