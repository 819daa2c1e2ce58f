"""The cost model of a training step and the check of a job's layout, before the job is paid for. No GPU, no process.

To read, from the inputs up: ``job`` (options, and the job they describe), ``rates`` (figures of GPUs and their sources;
single calls), ``layer`` and ``step`` (time and memory), ``measured`` (layers of the benchmark, and how far predictions
are off them), ``prediction`` (the whole), ``layout`` (every rank's groups and shapes), ``report`` (tables and charts).
The formulae are in slurm/PLAN.md.
"""
