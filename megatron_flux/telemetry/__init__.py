"""Traces of torch.profiler: taken, read, told by category, merged over ranks. Knows neither training nor benchmarks."""
