"""One-run audits: canaries, their scores, and the bound on ε that follows."""
