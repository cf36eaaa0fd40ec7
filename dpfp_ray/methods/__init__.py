"""How a model is trained: one file a method; `parts` has what several of them share."""
