"""``python -m megatron_flux.cli``: the command, where its script is not on the path."""

from megatron_flux.cli.main import main

if __name__ == "__main__":
    main()
