"""Jobs for processes of their own, good and bad."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def make(what):
    return {
        "spin": Child,
        "raise": Raises,
        "die": Dies,
        "family": Family,
        "eat": Eats,
    }[what]()


class Child:
    def __init__(self):
        self.steps = 0

    def setup(self, device):
        pass

    def step(self):
        self.steps += 1
        end = time.process_time() + 0.002
        while time.process_time() < end:
            pass
        return 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def teardown(self):
        pass


class Raises(Child):
    def step(self):
        raise ValueError("nothing left")


class Dies(Child):
    def step(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Family(Child):
    """Starts a process that leaves its group."""

    def step(self):
        if not self.steps:
            code = "while True: pass"
            other = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
            Path("/tmp", f"octotune-test-family-{os.getpid()}").write_text(str(other.pid))
        return super().step()


class Eats(Child):
    def __init__(self):
        super().__init__()
        self.kept = []

    def step(self):
        self.kept.append(bytearray(os.urandom(1 << 20)) * 40)
        return super().step()
