"""Records of runs as tables, figures and one page that people can publish."""
