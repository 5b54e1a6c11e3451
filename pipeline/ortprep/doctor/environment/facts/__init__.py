"""Facts about a machine: records, and what reads them."""
