"""Many runs on Ray: search spaces, trials, their cost, comparisons. No room below imports Ray."""
