"""From a plan to a result in one plain process: the loop, top to bottom, and what surrounds it."""
