"""Fixtures of other tests: the pools of tests/distributed, the commands of tests/train."""

from tests.distributed.conftest import templates, world2, world4
from tests.train.conftest import command, corpus, environment

__all__ = ["command", "corpus", "environment", "templates", "world2", "world4"]
