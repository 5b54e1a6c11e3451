#!/usr/bin/env bash
# Usage: MAX_REGRESSION=1.1 bash publish.sh LABEL KEY   Signs and publishes what was prepared, and makes it production.
set -euo pipefail
: "${MAX_REGRESSION:?for example 1.1}"
# NAME@DIGEST: if another kind of machine publishes this model under the label meanwhile, that names its version.
version=$(ortprep publish voice --label "$1" --sign "$2")
ortprep promote "$version" production --max-regression "$MAX_REGRESSION"
