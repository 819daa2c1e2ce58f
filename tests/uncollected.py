"""Imported before all else: nothing that is imported is garbage, and looking for it took a third of the time.

from tests import uncollected   # templates, whose forks call end(), have this as their first module
import torch
uncollected.end()
"""

import gc

gc.disable()


def end() -> None:
    """All is imported; collections look at what comes."""
    gc.freeze()
    gc.enable()
