"""Measurements beside a run: the environment, times of operator calls, traces of steps and where their time went."""
