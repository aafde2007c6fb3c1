"""What lets other engines run this package's models; one module an engine."""
