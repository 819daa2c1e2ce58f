"""The ranks that a benchmark runs on: process group, what must be so before it, decisions of all ranks, its folder."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_flux.comm import agreement, links
from megatron_flux.errors import UserError
from megatron_flux.metrics.strict_json import write_atomically
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.run import rank
from megatron_flux.telemetry import environment

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

logger = logging.getLogger("megatron_flux")
_T = TypeVar("_T")


def checked(
    command: str, group: dist.ProcessGroup, dtype: torch.dtype, *, chunks: bool = False
) -> tuple[torch.device, links.Link]:
    """The device of this rank and the link of ``group``, which can run the fused backend; collective. ``chunks``: a
    link that goes by chunks will do as well.

    Raises:
        UserError: no CUDA device, or the reason why the fused backend cannot run.
    """
    if not torch.cuda.is_available():
        raise UserError(f"{command} measures GPUs; no CUDA device is visible here")
    device = torch.device("cuda", torch.cuda.current_device())
    link = links.probe(group, device)
    if chunks and links.by_chunks(link):
        return device, link
    probe = torch.empty(8, 8, dtype=dtype, device=device)
    reason = get_backend("fused").why_not(probe, probe, group)
    if reason is not None:
        raise UserError(f"{command}: the fused backend cannot run here: {reason}")
    return device, link


@contextmanager
def opened() -> Iterator[dist.ProcessGroup]:
    """All ranks that a launcher started, each on its GPU.

    On an error the group is left as it is: tearing it down would wait for peers that may be gone.
    """
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    yield dist.group.WORLD
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """On the first rank, write what is logged, and the error that ends it, to ``path`` as well; each message once."""
    if not rank.is_first():
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    handler.addFilter(rank.once_per_message())  # what takes turns patches and unpatches in every round
    logger.addHandler(handler)
    try:
        yield
    except Exception as error:
        handler.stream.write(f"ended by {type(error).__name__}: {error}\n")
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()


class NotHereError(Exception):
    """Something cannot be measured on this machine or with these packages; the message says why."""


def attempt(action: Callable[[], _T], ranks: dist.ProcessGroup) -> tuple[_T | None, str | None]:
    """Run ``action`` on all ``ranks``: its result, or the first failing rank's reason on all of them."""
    result, mine = None, None
    try:
        result = action()
    except (NotHereError, UserError) as error:
        mine = (True, str(error))
    except Exception as error:  # whatever an arm raises is the reason why it is left out
        mine = (False, f"{type(error).__name__}: {error}")
    for number, found in enumerate(agreement.of_all_ranks(mine, ranks)):
        if found is not None:
            said = " ".join(found[1].split())[:500]
            return None, said if found[0] else f"rank {number}: {said}"
    return result, None


def machine(group: dist.ProcessGroup, link: links.Link) -> dict[str, Any]:
    """What a summary says of where it was measured."""
    return {
        "device": environment.device_name(),
        "tp": group.size(),
        "link": link.kind,
        "versions": environment.versions(),
        "environment": environment.switches(),
    }


def write(out: Path, summary: dict[str, Any], rounds: list[dict[str, Any]]) -> None:
    """Leave what was measured so far in ``out``: ``summary.json`` and ``rounds.jsonl``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
    write_atomically(out / "summary.json", json.dumps(summary, indent=1) + "\n")  # it may be killed at any time


def show(print_tables: Callable[..., None], summary: dict[str, Any], log: Path) -> None:
    """Print the tables of ``summary``, into ``log`` as well."""
    print_tables(summary)
    with log.open("a", encoding="utf-8") as file:
        print_tables(summary, file)
