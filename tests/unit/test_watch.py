"""The alarms that the watching thread looks through, while others come and go."""

from __future__ import annotations

import sys
import threading

from megatron_flux.comm import watch


def test_alarms_come_and_go_beside_the_watching_thread() -> None:
    done = threading.Event()

    def come_and_go() -> None:
        kept: list[watch.Alarm] = []
        while not done.is_set():
            alarm = object.__new__(watch.Alarm)  # without a GPU's memory
            alarm.open()
            kept.append(alarm)
            if len(kept) > 2000:
                for old in kept:
                    old.close()
                kept.clear()

    others = threading.Thread(target=come_and_go)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    others.start()
    try:
        for _ in range(1000):
            watch._watched()
    finally:
        sys.setswitchinterval(interval)
        done.set()
        others.join()
    alarm = object.__new__(watch.Alarm)
    alarm.open()
    assert alarm in watch._watched()
    alarm.close()
    assert alarm not in watch._watched()
