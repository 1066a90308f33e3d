"""create_app: the routes, within the layers that every request passes."""

from fastapi import FastAPI
from starlette.types import ASGIApp

import minivllm
from minivllm.server import chat, completions, embeddings, errors, other_routes
from minivllm.server.middleware import Authentication, BodyLimit, CrossOrigin, HeadAsGet, RequestId
from minivllm.server.service import Service


def create_app(service: Service) -> ASGIApp:
    """The ASGI application over ``service``."""
    settings = service.settings
    app: ASGIApp = BodyLimit(create_api(service), int(settings.max_body_size), service.draining)
    if settings.api_keys:
        app = Authentication(app, settings.api_keys)
    if settings.cors_origins:
        app = CrossOrigin(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return RequestId(HeadAsGet(app), service.draining)


def create_api(service: Service) -> FastAPI:
    """The routes alone."""
    api = FastAPI(
        title="mini-vllm",
        version=minivllm.__version__,
        description="OpenAI-compatible server.",
        redirect_slashes=False,
    )
    api.state.service = service
    for module in (chat, completions, embeddings, other_routes):
        api.include_router(module.router)
    errors.install(api)
    return api
