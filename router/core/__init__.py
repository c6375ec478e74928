"""Face to be written."""
