"""Records of runs on storage, and questions about them."""
