"""``megatron-flux slurm``: jobs on clusters that Slurm runs.

A ``profile`` describes a cluster and a ``job`` a model on nodes. ``render`` writes the script, which sources
``lib/job.sh`` and runs ``preflight/`` first; ``queue`` calls Slurm's commands.
"""
