"""What a trained model leaks, measured: canaries, scores, bounds. Called, it is `audit.audit`."""

import sys

from dpfp_ray import Room

sys.modules[__name__].__class__ = Room
