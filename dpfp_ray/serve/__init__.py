"""The Ray Serve application `dpfp-results`: live pages and a JSON API over the records of trials.

Called, it is `deploy.serve`. Only `deploy.py` knows Ray. The rest is an ASGI application that any
server can run.
"""

import sys

from dpfp_ray import Room

SERVICE = "dpfp-results"

sys.modules[__name__].__class__ = Room
