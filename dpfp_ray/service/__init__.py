"""The Ray Serve application `dpfp-results`: live pages and a JSON API over the records of trials.

Only `deploy.py` knows Ray. The rest is an ASGI application that any server can run.
"""

import hashlib

from dpfp_ray.sweeps.submit import SERVICE as SERVICE


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
