"""Publishes, pulls or collects in processes that kill themselves.

`python -m tests.registry.dying` forks for every line `["ACTION", "REGISTRY", "PATH", "NAME", STEP]`, and
answers with the exit code: imports take longer than what a process does.
"""

import json
import os
import re
import signal
import sys
import traceback
from pathlib import Path

import ortprep.registry.backends.directory
import ortprep.registry.backends.oci  # noqa: F401  both before anything is forked
from ortprep.registry.catalogue import Catalogue
from ortprep.registry.garbage_collection import RetentionPolicy, collect
from ortprep.registry.publish import publish
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.references import VersionRef, open_registry
from tests.registry.builders import Watched

_COUNTED = re.compile("(delete|list|open|put)_(file|ref|refs)|delete|has_file|progress|sweep")


def die_at(action, registry, path, name, step):
    steps = iter(range(step))

    def count(name, *_):
        """Ends the process with SIGKILL before a change, as a machine that loses power."""
        if _COUNTED.fullmatch(name) and next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    opened = open_registry(registry)
    folder = getattr(opened, "_folder", None)
    if folder is not None:
        folder.delete = Watched(folder, count).delete
    backend = Watched(opened, count)
    catalogue = Catalogue(backend)

    def observe(progress):
        count("progress")

    actions = {
        "publish": lambda: publish(Path(path), catalogue, observer=observe),
        "pull": lambda: pull(PullRequest(VersionRef(name, None)), catalogue, Path(path), observer=observe),
        "collect": lambda: collect(name, catalogue, policy=RetentionPolicy(0, 0, 0), dry_run=False),
    }
    actions[action]()


def main():
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                die_at(*json.loads(line))
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
