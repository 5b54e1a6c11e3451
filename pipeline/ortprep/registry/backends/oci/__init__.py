"""Any registry that speaks the OCI distribution API."""
