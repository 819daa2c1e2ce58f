"""megatron-core 0.15."""

from packaging.specifiers import SpecifierSet

from megatron_flux.patch.line import DEFERRED_WGRAD_OFF, MegatronCoreLine, linear_symbols

LINE = MegatronCoreLine(
    versions=SpecifierSet(">=0.15,<0.16"),
    symbols=linear_symbols(),
    neutral_keywords=DEFERRED_WGRAD_OFF,
)
