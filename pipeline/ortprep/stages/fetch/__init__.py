"""`fetch`: the source model and its external data, copied, inspected and checked against the spec."""
