"""Switch flux on in ms-swift with options: ``megatron sft --external_plugins flux_on.py ...``."""

import megatron_flux

megatron_flux.patch(megatron_flux.FluxConfig(gather_ahead=True))  # docs/configuration.md has the options
