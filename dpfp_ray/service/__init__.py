"""The Ray Serve application `dpfp-results`: live pages and a JSON API over the records of trials.

Only `deploy.py` knows Ray. The rest is an ASGI application that any server can run.
"""

SERVICE = "dpfp-results"
