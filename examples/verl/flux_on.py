"""Switch flux on in verl with options: ``VERL_USE_EXTERNAL_MODULES=flux_on``, with this folder on ``PYTHONPATH``.

Every process that imports verl imports this. Only workers with Megatron's engine are patched: not the driver, and not
the rollout.
"""

import wrapt

import megatron_flux


@wrapt.when_imported("verl.workers.engine.megatron.transformer_impl")
def switch_on(_: object) -> None:
    """Patch, before the engine builds its model."""
    megatron_flux.patch(megatron_flux.FluxConfig(keep_gathered=False))  # memory that the rollout may want back
