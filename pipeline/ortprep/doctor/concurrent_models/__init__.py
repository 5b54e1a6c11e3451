"""Do models that run at once run as fast as each alone, in threads and in processes? (`check.py`)."""
