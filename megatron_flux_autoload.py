"""What torch calls at the end of ``import torch``: switches flux on in Megatron-LM scripts where MEGATRON_FLUX says so.

A module of its own, because this runs in every process that imports torch: without the variable it reads the
environment, and that is all. torch skips it where TORCH_DEVICE_BACKEND_AUTOLOAD=0.

And the entry point of the command ``megatron-flux``.
"""

import importlib.util
import os
import signal
import sys

OFF = ("", "0", "false", "off", "no")
"""As :data:`megatron_flux.settings.OFF`, which is not imported here: every process with torch would import both."""


def main() -> None:
    """Run ``megatron-flux``; until it is imported, Ctrl-C ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    needed = ("jinja2", "plotly", "rich", "yaml")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        names = " ".join(needed).replace("yaml", "pyyaml")
        needs = f"it needs {missing[0]}, which is not installed: pip install {names} (the extra run)"
        print(f"megatron-flux: error: {needs}", file=sys.stderr)
        raise SystemExit(2)
    from megatron_flux.cli.main import main as command

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


def load() -> None:
    """Wait for Megatron-LM's modules; nothing of it is imported, and nothing is patched yet."""
    if os.environ.get("MEGATRON_FLUX", "").lower() in OFF:
        return
    from megatron_flux.megatron_lm import hooks

    hooks.register()
