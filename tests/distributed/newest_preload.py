"""Imported, it lets this process find Megatron-Bridge's newest release, and megatron-core and TransformerEngine as that
wants them, before those of the environment, and imports what its test does: each rank would take seconds for that.
Nothing happens where ``scripts/test.sh`` could not fetch them.
"""

import importlib
import os
import sys
import typing
from pathlib import Path

FOLDER = Path(sys.prefix, "newest-bridge-source")

if FOLDER.is_dir():
    os.environ["MEGATRON_FLUX_TE_SOURCE"] = str(FOLDER)  # read when the stand-in is imported
    sys.path.insert(0, str(FOLDER))
    if sys.version_info < (3, 12):
        typing.override = lambda function: function  # megatron-core from 0.17 on imports it
    importlib.import_module("tests.distributed.recipes").SOURCES["bridge"] = FOLDER.name
importlib.import_module("tests.distributed.te_preload")
if FOLDER.is_dir():
    for name in ("models.gpt_provider", "peft.lora"):
        importlib.import_module("tests.distributed.recipes").import_bridge(name)
