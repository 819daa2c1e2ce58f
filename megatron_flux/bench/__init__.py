"""Benchmarks, as functions that the command line calls."""
