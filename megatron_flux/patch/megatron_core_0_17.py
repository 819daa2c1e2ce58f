"""megatron-core 0.17."""

from packaging.specifiers import SpecifierSet

from megatron_flux.patch.line import DEFERRED_WGRAD_OFF, TE_SYMBOLS, MegatronCoreLine, linear_symbols

LINE = MegatronCoreLine(
    versions=SpecifierSet(">=0.17,<0.18"),
    symbols=linear_symbols(),
    te_symbols=TE_SYMBOLS,
    neutral_keywords=DEFERRED_WGRAD_OFF,
)
