"""Records of runs as tables, figures and one page that people can publish.

Called, it is `make.report`.
"""

import sys

from dpfp_ray import Room

sys.modules[__name__].__class__ = Room
