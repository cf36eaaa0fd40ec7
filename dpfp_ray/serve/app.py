"""The whole service as one ASGI application, which only reads."""

from typing import Any

from dpfp_ray import __version__
from dpfp_ray.data.storage import public
from dpfp_ray.plan.errors import UserError
from dpfp_ray.serve import SERVICE
from dpfp_ray.serve.api import NotThere, problem, routes
from dpfp_ray.serve.figures import Figures, TrialCurves
from dpfp_ray.serve.guard import Guard
from dpfp_ray.serve.pages import error_page, page_routes, wants_page
from dpfp_ray.serve.snapshot import LiveRecords, Payments


def build_app(storage: str, digest: str | None = None, ledger: str | None = None) -> Any:
    """`digest` is that of the token that readers need; without one only localhost is answered.

    `ledger` is where to read what the people in the data have paid (default: the user's own).
    """
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response

    records = LiveRecords(storage)
    command = f"dpfp serve --storage {public(storage)}"
    figures, curves = Figures(command), TrialCurves(command)
    app = FastAPI(
        title=SERVICE,
        version=__version__,
        summary="Read-only results of differentially private fine-tuning",
        description="An ε of a trial with `nominal: true` is no guarantee and is shown with †.",
        # Their pages load scripts from elsewhere; /openapi.json says the same.
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(routes(records, figures))
    app.include_router(page_routes(records, figures, curves, digest, Payments(ledger)))

    def refuse(request: Request, error: Exception | str, status: int) -> Response:
        if wants_page(request):
            return error_page(request, str(error), status)
        return problem(str(error), status)

    @app.exception_handler(UserError)
    async def bad_request(request: Request, error: UserError) -> Response:
        # Storage that cannot be reached is not the fault of the request.
        status = 503 if str(error).startswith("cannot reach") else 400
        return refuse(request, error, status)

    @app.exception_handler(NotThere)
    async def not_there(request: Request, error: NotThere) -> Response:
        return refuse(request, error, 404)

    @app.exception_handler(RequestValidationError)
    async def bad_parameter(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return refuse(request, f"{where}: {first['msg']}", 400)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        return refuse(request, str(error.detail), error.status_code)

    app.add_middleware(Guard, digest=digest)
    return app
