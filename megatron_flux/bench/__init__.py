"""Benchmarks of operators (``bench ops``, ``tune``), transformer layers (``bench layer``) and recording
(``bench metrics``), above training: the commands start them, :mod:`megatron_flux.run.rank` runs them on every rank.

* Operators: shapes, options, variants (what is compared), ops, async_tp, ops_report; tune, tuned_table.
* Layers: layer_config, layer_blocks, layer_arms (what is compared), layer_workload, layer, layer_agreement,
  layer_report; no_communication has the floors.
* Recording: metrics_cost.
* All: process_group (environment and ranks), collectives (decisions of all ranks). The timer is ops/timing.
"""
