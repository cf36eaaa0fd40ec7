"""Records as tables, figures and pages."""
