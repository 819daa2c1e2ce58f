"""The ``megatron-flux`` command: one file for each of its commands, thin; main.py puts them together."""
