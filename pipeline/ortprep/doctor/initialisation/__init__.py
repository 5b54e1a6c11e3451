"""`doctor init`: where the time between starting a job and its first result goes."""
