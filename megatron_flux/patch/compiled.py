"""Forget what torch.compile has made of layers whose methods have just been exchanged."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

import torch

_IDS = re.compile(r", (\d+)\)")


def forget(owners: Iterable[type]) -> None:
    """Have torch.compile trace layers of ``owners`` anew; what it has made of other code stays.

    It takes a class's methods for constants: what it compiled before would run on, on some ranks alone where other
    guards fail, while their peers wait elsewhere. Not ``torch.compiler.reset()``: TransformerEngine's compiled
    functions would be compiled again too, which took 0.3 s at each switch between stock and flux.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return
    kinds, classes = set[int](), list(owners)
    while classes:
        cls = classes.pop()
        if id(cls) not in kinds:
            kinds.add(id(cls))
            classes += cls.__subclasses__()
    try:
        from torch._dynamo import convert_frame, eval_frame

        for code in filter(None, (seen() for seen in convert_frame.input_codes.seen)):
            guards = [entry.guard_manager.code_parts for entry in eval_frame._debug_get_cache_entry_list(code)]
            # Whatever reads an attribute of a layer asks for its class first: ___check_type_id(..., id).
            if any(not parts or kinds & set(map(int, _IDS.findall(" ".join(parts)))) for parts in guards):
                eval_frame.reset_code(code)
    except (ImportError, AttributeError):  # another release of torch
        torch.compiler.reset()
