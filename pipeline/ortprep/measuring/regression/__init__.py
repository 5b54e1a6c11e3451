"""The gate between two versions of a bundle: what became worse, beyond a limit and the noise."""
