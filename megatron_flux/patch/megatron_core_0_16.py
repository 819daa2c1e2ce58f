"""megatron-core 0.16 (0.16.1 is the newest release for Python 3.11)."""

from packaging.specifiers import SpecifierSet

from megatron_flux.patch.line import DEFERRED_WGRAD_OFF, TE_SYMBOLS, MegatronCoreLine, linear_symbols

LINE = MegatronCoreLine(
    versions=SpecifierSet(">=0.16,<0.17"),
    symbols=linear_symbols(),
    te_symbols=TE_SYMBOLS,
    neutral_keywords=DEFERRED_WGRAD_OFF,
)
