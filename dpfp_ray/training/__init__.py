"""From a plan to a result in one plain process: the loop, top to bottom, and what surrounds it."""

# Rates of less training than this are the timer's noise and the first step's start-up.
LEAST_SECONDS = 1.0
