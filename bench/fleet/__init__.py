"""Simulates preparing a thousand models for five kinds of hardware: `python -m bench.fleet`.

`docs/scaling.md` says what is modelled, where the figures come from, and what follows.
"""
