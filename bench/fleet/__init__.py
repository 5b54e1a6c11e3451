"""What happens when a thousand models are prepared for five kinds of hardware? `python -m bench.fleet`.

A simulation, not a run: `docs/scaling.md` says what is modelled, whence the figures come, and what
follows.
"""
