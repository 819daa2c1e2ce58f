"""Benchmarks of operators (``bench ops``, ``tune``), transformer layers (``bench layer``) and passes without gradients
(``bench inference``): the commands start them, :mod:`megatron_flux.run.rank` runs them on every rank.

* Operators: shapes (calls and options), ops, tune.
* Layers: layer_config, layer_arms (what is compared), layer_steps, layer_workload, layer; no_communication: the floors.
* Inference: inference_config, inference_workload, inference, inference_report; all_reduce, int4_mlp.
* All: process_group (ranks and their decisions), report (tables and pictures). The timer is ops/timing.
"""
