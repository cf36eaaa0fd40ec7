"""`python -m dpfp_ray.cli` is `dpfp`."""

import sys

from dpfp_ray.cli.main import main

sys.exit(main())
