"""`doctor parallel`: sessions in threads against processes, what the GIL does to them, workers' threads."""
