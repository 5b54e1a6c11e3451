"""Child processes that run and measure what a job would."""
