#!/usr/bin/env bash
# Usage: bash publish.sh VERSION KEY   Signs and publishes what was prepared, and makes it production.
set -euo pipefail
ortprep publish voice --label "$1" --sign "$2"
ortprep promote "voice@$1" production --max-regression "$MAX_REGRESSION"
