"""From a bundle to a session: read, select, check, build, assert. `bundle_loader` shows the order."""
