"""Cost functions that choose a worker."""
