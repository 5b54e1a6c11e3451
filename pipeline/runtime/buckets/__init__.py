"""Loading with shape buckets."""
