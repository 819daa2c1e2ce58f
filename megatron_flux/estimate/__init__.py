"""The cost model of a step and the check of a layout, before a job is paid for. No GPU, no process."""
