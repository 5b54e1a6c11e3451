#!/usr/bin/env bash
# Prepares the model and fails if anything is worse than in production. FAIL_OVER is how much worse, such as 10%.
set -euo pipefail
ortprep prepare voice
ortprep compare voice@production voice --if-published --partial --fail-over "$FAIL_OVER"
