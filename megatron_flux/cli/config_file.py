"""``--config FILE``: options from YAML, or from the ``config.json`` that a run folder holds, which is YAML as well.

A file of one's own has options by their names, dashes or underscores::

    preset: llama2-70b
    num_layers: 4
    layer_backend: ["*.mlp.*=reference"]

A run's ``config.json`` says what its options meant on that machine. Read back, sizes come from its ``shape``, the
number of processes from ``world_size``; its ``out`` is left out, since a run has its folder for itself. Where another
``--preset`` is given beside it, what a preset decides is that one's.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic.fields import FieldInfo

from megatron_flux import plain_yaml
from megatron_flux.errors import UserError
from megatron_flux.train.options import CheckpointOptions, CompareOptions
from megatron_flux.train.presets import ModelShape

_DECIDED = {"command", "padded_vocab_size", "device", "dp", "text", "shape", "world_size", "tp"}
_OF_SOME_COMMANDS = {*CheckpointOptions.model_fields, *CompareOptions.model_fields}
"""What ``config.json`` has and a command may lack: decided by options, machine and data; and others' options."""
_OF_PRESET = {*ModelShape.model_fields, "micro_batch_size", "global_batch_size", "lr"}


def read(file: Path, fields: Mapping[str, FieldInfo], said: Container[str] = ()) -> dict[str, Any]:
    """The options that ``file`` gives, by name, unchecked but for their names; not those that are ``said`` beside it.

    Raises:
        UserError: no file, no YAML, no such option, or true or false for an option that is neither.
    """
    try:
        given = plain_yaml.load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {file} cannot be read: {getattr(error, 'strerror', error)}") from None
    except yaml.YAMLError as error:
        raise UserError(f"--config {file} is no YAML: {error}") from None
    if not isinstance(given, dict):
        raise UserError(f"--config {file} must hold options as NAME: VALUE, or be a run folder's config.json")
    if isinstance(given.get("config"), dict):
        ran = _of_run(given["config"], fields) | (given.get("cost") or {})
        given = {name: v for name, v in ran.items() if not ("preset" in said and name in _OF_PRESET)}
    found = {str(name).replace("-", "_"): value for name, value in given.items()}
    for name, value in found.items():
        if name not in fields:
            allowed = ", ".join(fields)
            raise UserError(f"--config {file}: {name} is no option of this command; use some of: {allowed}")
        kinds = (fields[name].annotation, *get_args(fields[name].annotation))
        if isinstance(value, bool) and bool not in kinds:  # pydantic would take it for 1 or 0
            raise UserError(f"--config {file}: {name} is {str(value).lower()}, which is no value of this option")
    return {name: value for name, value in found.items() if name not in said}


def _of_run(config: dict[str, Any], fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """The options of a run, from what its ``config.json`` holds of it."""
    if config.get("command") == "train":
        config = {name: value for name, value in config.items() if name not in ("block_steps", "warmup_steps")}
    found = {name: value for name, value in (config.get("shape") or {}).items() if name in fields}
    found |= {name: v for name, v in config.items() if name in fields or name not in _DECIDED | _OF_SOME_COMMANDS}
    found.pop("out", None)
    if "nproc" in fields:
        found["nproc"] = config.get("world_size", config.get("tp"))
    if isinstance(steps := found.get("profile_steps"), list):
        found["profile_steps"] = "-".join(map(str, steps))
    for name, value in found.items():
        if name in fields and fields[name].annotation is str and isinstance(value, list):
            found[name] = ",".join(map(str, value))
    return found
