"""The last stage: everything in one folder that appears in one rename."""
