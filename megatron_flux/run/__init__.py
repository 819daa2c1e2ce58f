"""Ranks and folders of a run, whatever is run: used by training and by the benchmarks, and knows neither."""
