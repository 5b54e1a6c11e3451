"""An MLflow tracking server with its model registry."""
