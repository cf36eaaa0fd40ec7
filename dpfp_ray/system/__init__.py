"""What is no part of the story: files and object stores, leases, caches, terminal, errors."""
