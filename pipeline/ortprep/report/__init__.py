"""The HTML report of bundles, and the gate between two versions of them."""
