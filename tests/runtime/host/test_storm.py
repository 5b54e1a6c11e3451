"""Programs ask while the host is killed again and again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest

from ortprep.errors import HostError
from ortprep.runtime.host.process import read_status
from tests.runtime.builders import weights_of

pytestmark = [pytest.mark.runtime, pytest.mark.slow]

CLIENT = """\
import json, sys
import numpy as np
from ortprep.errors import HostDiedError
from ortprep.runtime import connect
bundle, weights, seed, count = sys.argv[1], np.load(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
random, found, session = np.random.default_rng(seed), {"right": 0, "wrong": 0, "died": 0}, None
while found["right"] < count:
    x = random.standard_normal((int(random.choice([1, 3, 50, 20_000])), 8)).astype(np.float32)
    try:
        session = session or connect(bundle, start=True)
        (y,) = session.run(None, {"x": x})
        is_right = y.shape == (len(x), 4) and np.allclose(y, x @ weights, rtol=1e-3, atol=1e-4)
        found["right" if is_right else "wrong"] += 1
        if found["right"] % 50 == 0:
            session = session.close()
    except HostDiedError:
        found["died"] += 1
print(json.dumps(found))
"""


def test_no_answer_is_wrong_and_no_program_hangs_while_the_host_is_killed(bundle, tmp_path):
    np.save(tmp_path / "weights.npy", weights_of(0))
    command = [sys.executable, "-c", CLIENT, str(bundle), str(tmp_path / "weights.npy")]
    clients = [
        subprocess.Popen([*command, str(seed), "300"], stdout=subprocess.PIPE, text=True) for seed in range(3)
    ]
    kills = 0
    end = time.monotonic() + 400
    while any(client.poll() is None for client in clients):
        assert time.monotonic() < end
        time.sleep(1)
        with suppress(HostError, ProcessLookupError):
            status = read_status()
            if status is not None:
                os.kill(status["pid"], signal.SIGKILL)
                kills += 1
    for client in clients:
        found = json.loads(client.communicate()[0])
        assert (client.returncode, found["right"], found["wrong"]) == (0, 300, 0)
    assert kills > 1
