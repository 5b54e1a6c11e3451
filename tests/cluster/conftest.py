"""What holds for every test on Ray."""

from __future__ import annotations

import os

# Before anything imports Ray.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # as later versions of Ray have it, without a warning
