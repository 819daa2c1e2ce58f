"""megatron-core 0.19: weights may be sharded once more, over a GTP group (``gtp_remat_size``); those run stock."""

from types import MappingProxyType

from packaging.specifiers import SpecifierSet

from megatron_flux.patch.line import DEFERRED_WGRAD_OFF, TE_SYMBOLS, MegatronCoreLine, linear_symbols

_GTP_OFF = {"gtp_remat_size": 1}

LINE = MegatronCoreLine(
    versions=SpecifierSet(">=0.19,<0.20"),
    symbols=linear_symbols("gtp_remat_size"),
    te_symbols=TE_SYMBOLS,
    neutral_keywords=MappingProxyType({**DEFERRED_WGRAD_OFF, **_GTP_OFF}),
    neutral_attributes=MappingProxyType(_GTP_OFF),
)
