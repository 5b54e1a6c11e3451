"""Has the kernel forget files that no process has mapped, as after a reboot.

Usage: python evict.py FILE…
"""

import os
import sys

for path in sys.argv[1:]:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)  # what is not on the disk yet cannot be forgotten
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
