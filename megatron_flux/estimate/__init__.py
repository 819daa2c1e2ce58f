"""The cost model of a training step and the check of a job's layout, before the job is paid for. No GPU, no process.

To read, from the inputs up: ``rates`` (figures of GPUs, measured calls and layers), ``job`` (options, and the job they
describe), ``step`` (time and memory of layers, stages and the whole), ``measured`` (how far predictions are off),
``prediction`` (the whole), ``layout`` (every rank's groups and shapes), ``report`` (tables and charts). The formulae
are in slurm/PLAN.md.
"""
