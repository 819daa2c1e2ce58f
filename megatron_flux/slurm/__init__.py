"""``megatron-flux slurm``: jobs on clusters that Slurm runs.

In the order of reading: ``profile`` (what a user may say of a cluster), ``job`` (a model on nodes, checked for that
cluster), ``render`` (the job's script) and ``lib/job.sh`` (what every script sources), ``queue`` (Slurm's own
commands), ``status`` (a job's folder: how far it is, why it ended, its results side by side), ``submit`` (and resume),
and ``preflight/``, which jobs run on their nodes before anything else.
"""
