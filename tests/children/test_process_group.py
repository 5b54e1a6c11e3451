"""Programs in a process group of their own end with this process, and run as they would without it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ortprep.children.process_group import start_program, wait_for_end
from tests.children.test_child import assert_gone

STARTER = """
import os, sys, time
from pathlib import Path
from ortprep.children.process_group import start_program

with open(os.devnull, "wb") as null:
    run = ["sh", "-c", "echo $$ > pid; exec sleep 600"]
    options = {"environment": dict(os.environ), "refusal": Path("refusal"), "stdout": null, "stderr": null}
    process = start_program(run, folder=Path.cwd(), **options)
while not Path("pid").exists() or not Path("pid").read_text():
    time.sleep(0.01)
print(Path("pid").read_text(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [9, 15])
def test_a_program_ends_with_the_process_that_started_it(tmp_path, number):
    with subprocess.Popen(
        [sys.executable, "-c", STARTER], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        program = int(starter.stdout.readline())
        starter.send_signal(number)
    assert_gone(program)


def test_a_program_gets_its_arguments_its_environment_and_the_usual_signals(tmp_path):
    run = [
        sys.executable,
        "-c",
        "import os, sys; print(sys.argv[1:], os.environ['OWN'])\n"
        "print([line for line in open('/proc/self/status') if line.startswith('SigIgn')])",
        "-a",
        "b c",
        "",
    ]
    environment = {"OWN": "value", "PATH": os.environ["PATH"]}
    with (tmp_path / "out").open("w+b") as out:
        options = {"environment": environment, "stdout": out, "stderr": out}
        process = start_program(run, folder=tmp_path, refusal=tmp_path / "refusal", **options)
        assert not wait_for_end(process, 60)
    expected = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    assert (tmp_path / "out").read_text() == expected
    assert (process.returncode, (tmp_path / "refusal").exists()) == (0, False)


def test_a_program_that_is_not_there_is_a_refusal(tmp_path):
    with (tmp_path / "out").open("wb") as out:
        options = {"environment": dict(os.environ), "stdout": out, "stderr": out}
        refusal = tmp_path / "refusal"
        process = start_program(["no-such-program"], folder=tmp_path, refusal=refusal, **options)
        wait_for_end(process, 60)
    assert refusal.read_text() == "No such file or directory"
