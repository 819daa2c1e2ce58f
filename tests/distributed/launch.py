"""``python -m tests.distributed.launch WORDS``: the launcher with two ranks, which do what the words say."""

import sys

from megatron_flux.errors import FluxError
from megatron_flux.run.launcher import launch

if __name__ == "__main__":
    try:
        launch("tests.distributed.launched", " ".join(sys.argv[1:]), 2, left="the rest is in the attic")
    except FluxError as error:
        print(type(error).__name__, error)
        sys.exit(1)
