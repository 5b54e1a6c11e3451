"""Runs commands in turns, and prints the median time of each.

Usage: python compare_times.py ROUNDS COMMAND COMMAND…
"""

import shlex
import statistics
import subprocess
import sys
import time

rounds, commands = int(sys.argv[1]), sys.argv[2:]
times: dict[str, list[float]] = {command: [] for command in commands}
for number in range(rounds):
    for command in commands if number % 2 else reversed(commands):  # each is first as often as last
        began = time.monotonic()
        subprocess.run(shlex.split(command), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        times[command].append(time.monotonic() - began)
for command in commands:
    low, median, high = statistics.quantiles(times[command], n=4)
    print(f"{median:.3f} s, quartiles {low:.3f} to {high:.3f} s: {command}")
