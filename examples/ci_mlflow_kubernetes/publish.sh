#!/usr/bin/env bash
# Usage: bash publish.sh LABEL KEY   Signs and publishes what was prepared, and makes it production.
set -euo pipefail
# NAME@DIGEST: if another kind of machine has published this model under the label, this version is called LABEL-2.
version=$(ortprep publish voice --label "$1" --sign "$2")
ortprep promote "$version" production --max-regression "$MAX_REGRESSION"
