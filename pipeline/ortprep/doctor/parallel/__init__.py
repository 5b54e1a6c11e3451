"""How are many sessions ready soonest: one after another, in threads, or in processes? (`check.py`)."""
