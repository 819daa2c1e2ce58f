"""megatron-core 0.18."""

from packaging.specifiers import SpecifierSet

from megatron_flux.patch.line import DEFERRED_WGRAD_OFF, MegatronCoreLine, linear_symbols

LINE = MegatronCoreLine(
    versions=SpecifierSet(">=0.18,<0.19"),
    symbols=linear_symbols(),
    neutral_keywords=DEFERRED_WGRAD_OFF,
)
